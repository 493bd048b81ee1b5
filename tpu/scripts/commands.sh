# shellcheck shell=bash
# What each command of cloud.sh runs. It sources this file, reads the options into variables, checks them, and
# calls COMMAND_it.

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

give_up() {
  printf 'error: %s\n' "$1" >&2
  exit "${2-1}"
}

say() {
  if [[ $print ]]; then printf '# %s\n' "$1"; else printf '%s\n' "$1" >&2; fi
}

# Everything that changes or asks anything goes through here.
run() {
  if [[ $print ]]; then printf '%s\n' "$(quoted "$@")"; else "$@"; fi
}

# The words as a shell takes them back.
quoted() {
  local word line=''
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
    esac
    line+="$word "
  done
  printf '%s' "${line% }"
}

# The image that Google names for each generation: https://docs.cloud.google.com/tpu/docs/runtimes
runtime_for() {
  case $1 in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

on_worker() { # WORKER COMMAND [FLAG]
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" ${3+"$3"} "--command=$2"
}

copy_to_all() {
  run gcloud compute tpus tpu-vm scp "$@" "${where[@]}" --worker=all
}

create_it() {
  if [[ $queued ]]; then
    request_queue
    wait_until_active
  else
    run gcloud compute tpus tpu-vm create "$name" "${where[@]}" "--accelerator-type=$accelerator" \
      "--version=$runtime" ${create_flags[@]+"${create_flags[@]}"}
  fi
}

request_queue() {
  run gcloud compute tpus queued-resources create "$name" "${where[@]}" "--node-id=$name" \
    "--accelerator-type=$accelerator" "--runtime-version=$runtime" ${spot:+--spot} \
    ${create_flags[@]+"${create_flags[@]}"}
}

describe_queue() {
  run gcloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' \
    --verbosity=error
}

# READY, PREEMPTED ...
describe_vm() {
  run gcloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)' --verbosity=error
}

# ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED ...; ABSENT where there is none.
queue_state() {
  local answer
  if answer=$(describe_queue 2>&1); then
    printf '%s\n' "$answer" | tail -n 1
  elif [[ $answer == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    printf '%s\n' "$answer" >&2
    return 1
  fi
}

wait_until_active() {
  local state
  if [[ $print ]]; then
    say "every $poll s, until it says ACTIVE:"
    describe_queue
    return
  fi
  while state=$(queue_state); do
    case $state in
      ACTIVE) return ;;
      ABSENT | FAILED | SUSPENDED) give_up "--name: $name is $state; delete it and create it again" ;;
    esac
    say "$name is $state"
    sleep "$poll"
  done
  give_up "--name: the state of $name cannot be read"
}

install_it() {
  local requirement files=("$here/worker.sh") first='' own='' archive extra=tpu
  if [[ $backend == tpu ]]; then extra=torchtpu; fi
  if [[ -d $package ]]; then
    # The archive of a clone is installed as a source distribution is. Nobody else may change it on its way.
    own=${TMPDIR:-/tmp}/portable-trainer.XXXXXX
    if [[ $print ]]; then run mktemp -d "$own"; else own=$(mktemp -d "$own") || return; fi
    archive=$own/portable-trainer.tar.gz
    run git -C "$package" archive --format=tar.gz --prefix=portable-trainer/ "--output=$archive" HEAD || return
    files+=("$archive")
    requirement="portable/portable-trainer.tar.gz[$extra]"
  elif [[ -f $package ]]; then
    files+=("$package")
    requirement="portable/${package##*/}[$extra]"
  else
    requirement=$package
  fi
  on_worker all 'mkdir -p portable' || return
  if [[ $setup ]]; then
    copy_to_all "$setup" "$name:portable/setup.sh" || return
    first='bash portable/setup.sh && '
  fi
  copy_to_all "${files[@]}" "$name:portable/" || return
  if [[ $own ]]; then run rm -r "$own"; fi
  on_worker all "${first}bash portable/worker.sh install $(quoted "$requirement")"
}

train_it() {
  local settings=()
  if [[ $config ]]; then
    copy_to_all "$config" "$name:portable/run.yaml" || return
    settings+=(--config portable/run.yaml)
  fi
  if [[ $output_dir ]]; then settings+=(--output_dir "$output_dir"); fi
  settings+=(${arguments[@]+"${arguments[@]}"})
  on_worker all "$(quoted bash portable/worker.sh start ${settings[@]+"${settings[@]}"})"
}

status_it() {
  if [[ $queued ]]; then describe_queue; else describe_vm; fi
  on_worker all 'bash portable/worker.sh status'
}

logs_it() {
  # With a terminal of its own, tail ends there when it is interrupted here.
  on_worker "$worker" 'bash portable/worker.sh logs' --ssh-flag=-t
}

stop_it() {
  on_worker all 'bash portable/worker.sh stop'
}

fetch_it() {
  run gcloud compute tpus tpu-vm scp --recurse "$name:$output_dir" "$to" "${where[@]}" --worker=0
}

convert_it() {
  run portable-convert "$from" "$to" ${arguments[@]+"${arguments[@]}"}
}

delete_it() {
  local answer
  if [[ ! $yes && ! $print ]]; then
    read -r -p "Delete $name in $zone, with everything on its own disks? [y/N] " answer
    [[ $answer == [yY]* ]] || give_up "$name was not deleted"
  fi
  delete_tpu
}

delete_tpu() {
  if [[ $queued ]]; then
    run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
  else
    run gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet
  fi
}

ask_worker() {
  on_worker 0 'if [ -f portable/worker.sh ]; then bash portable/worker.sh state; else echo not-installed; fi'
}

worker_state() {
  local answer
  answer=$(ask_worker 2>/dev/null) || return
  printf '%s\n' "$answer" | tail -n 1 | tr -d '\r'
}

# Every look starts from what is there, so that it does not matter when this was started or stopped.
keep_it() {
  local state before='' failures=0
  if [[ $print ]]; then
    show_keep
    return
  fi
  # A worker is often out of reach for some minutes around a preemption; a mistake is so for ever.
  while ((failures < 10)); do
    state=$(queue_state) || state=UNKNOWN
    if [[ $state == ACTIVE ]]; then
      # A machine that does not answer may be preempted already while its queued resource is still ACTIVE.
      state=$(worker_state) || state=$(describe_vm) || state=UNKNOWN
    fi
    if [[ $state != "$before" ]]; then say "$name: $state"; fi
    case $state in
      UNKNOWN | READY) false ;;
      ABSENT) request_queue ;;
      SUSPENDED | FAILED | PREEMPTED | TERMINATED) delete_tpu && request_queue ;;
      not-installed | not-started | lost) install_it && train_it ;;
      ended-0)
        say "the run is done; $name is still there, and paid for, until you delete it"
        return
        ;;
      ended-*)
        # A preempted run ends a moment before its TPU does: only what stays so was not a preemption.
        [[ $state != "$before" ]] ||
          give_up "$name: the run has ended with ${state#ended-}; see cloud.sh logs" "${state#ended-}"
        ;;
    esac && failures=0 || failures=$((failures + 1))
    before=$state
    sleep "$poll"
  done
  give_up "$name: $failures attempts in a row have failed; the last state was $state"
}

show_keep() {
  say "every $poll s:"
  describe_queue
  say 'where there is none:'
  request_queue
  say 'where it is ACTIVE:'
  ask_worker
  say 'where that is not answered:'
  describe_vm
  say 'where it was preempted (SUSPENDED, PREEMPTED, TERMINATED) or refused (FAILED):'
  delete_tpu
  request_queue
  say 'where nothing runs there (not-installed, not-started, lost):'
  install_it
  train_it
}
