#!/usr/bin/env bash
# Train on Cloud TPU from a terminal: from creating the machines to a folder of safetensors. See docs/tpu.md.
# Keeps to what bash 3.2 knows, which macOS still has.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=commands.sh
. "$here/commands.sh"

commands='create install train status logs keep stop fetch convert delete'

summary_of() {
  case $1 in
    create) echo 'Create a TPU VM, or a queued resource (--queued, --spot) and wait until it is ACTIVE.' ;;
    install) echo 'Install the trainer on every worker.' ;;
    train) echo 'Start portable-train on every worker, detached, with the backend that was installed.
Where it runs already, it is left alone; where it has ended, it goes on from its last checkpoint.
ARGUMENTS go to portable-train.' ;;
    status) echo 'Say how the TPU is, and the run on every worker.' ;;
    logs) echo 'Follow the log of one worker.' ;;
    keep) echo 'Keep a run going on a queued resource, through preemptions, until it is done.
Creates what is missing, installs and trains; after a preemption deletes, creates, installs and trains again.
May be stopped and started at any time. Ends with the exit code of the run. ARGUMENTS go to portable-train.' ;;
    stop) echo 'Ask the run to save and end (SIGTERM), and wait until it has.
It ends with 75; train goes on from there.' ;;
    fetch) echo 'Copy a folder of worker 0 here: the whole run, one checkpoint or final/.' ;;
    convert) echo 'Turn a fetched run or checkpoint into safetensors. ARGUMENTS go to portable-convert.' ;;
    delete) echo 'Delete the TPU, with everything on its own disks.' ;;
  esac
}

options_of() {
  case $1 in
    create) echo 'name zone project type runtime-version queued spot create-flag poll' ;;
    install) echo 'name zone project backend package setup' ;;
    train) echo 'name zone project config output-dir' ;;
    status | delete) echo 'name zone project queued spot' ;;
    logs) echo 'name zone project worker' ;;
    keep) echo 'name zone project type runtime-version spot create-flag backend package setup config output-dir poll' ;;
    stop) echo 'name zone project' ;;
    fetch) echo 'name zone project output-dir to' ;;
    convert) echo 'from to' ;;
  esac
  if [[ $1 == delete ]]; then echo yes; fi
  echo print
}

help_of() {
  case $1 in
    name) echo 'NAME     of the TPU, and of its queued resource' ;;
    zone) echo 'ZONE     where it is' ;;
    project) echo 'ID       the Google Cloud project; without it, the one gcloud is set to' ;;
    type) echo 'TYPE     v5e-8, v5litepod-16, v5p-8, v6e-4 ... (v5e-N stands for v5litepod-N)' ;;
    runtime-version) echo 'VERSION  of the image; without it, the one that Google names for the type' ;;
    queued) echo '         it is a queued resource' ;;
    spot) echo '         it is a queued resource at the spot price, which may be preempted' ;;
    create-flag) echo 'FLAG     one more flag for gcloud where it creates; may be given again' ;;
    backend) echo 'BACKEND  xla (PyTorch/XLA), or tpu (TorchTPU); xla without it' ;;
    package) echo 'WHAT     a wheel, an archive, a clone (its last commit) or a requirement with the extra tpu
                             (torchtpu for TorchTPU); without it, the clone that this script is part of' ;;
    setup) echo 'FILE     a script of yours, run on every worker first: mounts storage, logs in ...' ;;
    config) echo 'FILE     YAML; copied to every worker' ;;
    output-dir) echo 'DIR      of the run, as the workers see it, or a URL (gs://bucket/run)' ;;
    worker) echo 'N        which worker; 0 without it' ;;
    from) echo 'DIR      the fetched run or checkpoint' ;;
    to) echo 'DIR      the new folder' ;;
    poll) echo 'SECONDS  between two looks; 60 without it' ;;
    yes) echo '         do not ask first' ;;
    print) echo '         show each command and run none' ;;
  esac
}

usage() {
  local command
  printf 'usage: cloud.sh COMMAND [OPTIONS] [-- ARGUMENTS]\n\n'
  for command in $commands; do
    printf '  %-8s %s\n' "$command" "$(summary_of "$command" | head -n 1)"
  done
  printf '\nThe options of each: cloud.sh COMMAND --help. What a command would run: --print.\n'
}

usage_of() {
  local option
  printf 'usage: cloud.sh %s [OPTIONS]%s\n\n%s\n\n' "$1" "$(takes_arguments "$1" && echo ' [-- ARGUMENTS]')" \
    "$(summary_of "$1")"
  for option in $(options_of "$1"); do printf '  --%-16s %s\n' "$option" "$(help_of "$option")"; done
}

takes_arguments() { [[ $1 == train || $1 == keep || $1 == convert ]]; }

listed() {
  local word
  for word in $2; do
    if [[ $word == "$1" ]]; then return; fi
  done
  return 1
}

name='' zone='' project='' accelerator='' runtime='' queued='' spot='' package='' setup='' config=''
output_dir='' backend=xla worker=0 from='' to='' poll=60 yes='' print=''
create_flags=() arguments=()

read_options() {
  local option value
  while (($#)); do
    case $1 in
      --help | -h)
        usage_of "$command"
        exit 0
        ;;
      --)
        shift
        takes_arguments "$command" || fail "--: $command takes no arguments for another program; leave it out"
        arguments=("$@")
        return
        ;;
      --*) option=${1%%=*} ;;
      *) fail "$1: not an option; arguments for another program come after --" ;;
    esac
    listed "${option#--}" "$(options_of "$command")" ||
      fail "$option: not an option of $command; see: cloud.sh $command --help"
    case $option in
      --queued | --spot | --yes | --print)
        [[ $1 != *=* ]] || fail "$option: takes no value; leave out ${1#"$option"}"
        shift
        ;;
      *)
        if [[ $1 == *=* ]]; then
          value=${1#*=}
          shift
        else
          # Only gcloud's own flags begin with a dash; elsewhere it is a forgotten value.
          [[ $# -gt 1 && ($2 != -* || $option == --create-flag) ]] || fail "$option: needs a value after it"
          value=$2
          shift 2
        fi
        [[ $value ]] || fail "$option: needs a value that is not empty"
        ;;
    esac
    case $option in
      --name) name=$value ;;
      --zone) zone=$value ;;
      --project) project=$value ;;
      --type) accelerator=$value ;;
      --runtime-version) runtime=$value ;;
      --queued) queued=1 ;;
      --spot) queued=1 spot=1 ;;
      --create-flag) create_flags+=("$value") ;;
      --package) package=$value ;;
      --backend) backend=$value ;;
      --setup) setup=$value ;;
      --config) config=$value ;;
      --output-dir) output_dir=$value ;;
      --worker) worker=$value ;;
      --from) from=$value ;;
      --to) to=$value ;;
      --poll) poll=$value ;;
      --yes) yes=1 ;;
      --print) print=1 ;;
    esac
  done
}

check_options() {
  local takes file
  takes=$(options_of "$command")
  if listed name "$takes"; then
    [[ $name ]] || fail "--name: missing; name the TPU"
    [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
      fail "--name: $name must be lower-case letters, digits and dashes, and begin with a letter"
    [[ $zone ]] || fail "--zone: missing; say where the TPU is or shall be"
    [[ $zone =~ ^[a-z]+-[a-z0-9]+-[a-z0-9]+$ ]] || fail "--zone: $zone is no zone; write it like us-west4-a"
    where=("--zone=$zone")
    if [[ $project ]]; then where+=("--project=$project"); fi
  fi
  if listed type "$takes"; then
    [[ $accelerator ]] || fail "--type: missing; for example v5e-8"
    accelerator=${accelerator/#v5e-/v5litepod-}
    [[ $accelerator != tpu7x-* ]] ||
      fail "--type: ${accelerator%%-*} is not offered by the Cloud TPU API; create it on Compute Engine or GKE"
    [[ $accelerator =~ ^(v2|v3|v4|v5p|v5litepod|v6e)-[1-9][0-9]*$ ]] ||
      fail "--type: $accelerator is unknown; write a generation of v2, v3, v4, v5e, v5p or v6e and a size: v5e-8"
    [[ $runtime ]] || runtime=$(runtime_for "$accelerator")
  fi
  [[ $backend == xla || $backend == tpu ]] || fail "--backend: $backend is not one of xla, tpu"
  [[ $worker =~ ^[0-9]+$ ]] || fail "--worker: $worker is no worker; give one number, from 0"
  [[ $poll =~ ^[0-9]+$ ]] || fail "--poll: $poll is no number of seconds"
  for file in "$setup" "$config"; do
    [[ -z $file || -f $file ]] || fail "--$([[ $file == "$setup" ]] && echo setup || echo config): there is no $file"
  done
  if listed package "$takes"; then
    if [[ -z $package ]]; then
      package=$(cd "$here/../.." && pwd)
      [[ -f $package/pyproject.toml ]] || fail "--package: missing; give a wheel, a clone or a requirement"
    fi
    case $package in
      *://*) ;; # a requirement that names where it is
      /* | ./* | ../* | *.whl | *.tar.gz) [[ -e $package ]] || fail "--package: there is no $package" ;;
    esac
  fi
  case $command in
    keep)
      # The disks of a preempted TPU are gone: a run that is to go on must not have saved there.
      [[ $output_dir == /* || $output_dir == *://* ]] ||
        fail "--output-dir: keep needs what outlives the TPU: a URL (gs://...), or an absolute path mounted by --setup"
      queued=1
      ;;
    fetch)
      [[ $output_dir ]] || fail "--output-dir: missing; say what to copy"
      [[ $output_dir != *://* ]] ||
        fail "--output-dir: $output_dir is a URL, so it is not on the TPU; give it to portable-convert as it is"
      [[ $to ]] || fail "--to: missing; name a new folder"
      [[ ! -e $to ]] || fail "--to: $to exists; name a new folder"
      ;;
    convert)
      [[ $from ]] || fail "--from: missing; name the fetched folder"
      [[ $to ]] || fail "--to: missing; name a new folder"
      ;;
    delete)
      [[ $yes || $print || -t 0 ]] || fail "--yes: needed where nobody can be asked"
      ;;
  esac
  [[ $print || $command == convert ]] || command -v gcloud >/dev/null ||
    fail "gcloud: not found; install the Google Cloud CLI, or use --print"
}

case ${1-} in
  '' | --help | -h)
    usage
    exit 0
    ;;
esac
command=$1
shift
listed "$command" "$commands" || fail "$command: no such command; use one of: $commands"
read_options "$@"
check_options
"$command"_it
