#!/usr/bin/env bash
# A TPU worker's side of cloud.sh, which copies it to every worker and calls it there.
#
#   install REQUIREMENT   make an environment and install the trainer into it
#   start [ARGUMENTS]     start portable-train, detached; leave one alone that runs. The backend is tpu where
#                         TorchTPU (the extra torchtpu) was installed, else xla
#   stop                  send SIGTERM and wait until the run has saved and ended
#   state                 not-installed, not-started, running, ended-CODE, or lost (the machine was restarted)
#   status                the state and the last line of the log
#   logs                  follow the log
set -euo pipefail

home=${PORTABLE_HOME:-$HOME/portable}
trainer=$home/venv/bin/portable-train

install() {
  local archive=${1%\[*} constraints=() versions=constraints-xla.txt
  if [[ $1 == *torchtpu* ]]; then versions=constraints.txt; fi
  if [[ ! -x $home/uv/bin/uv ]]; then
    if ! python3 -c 'import ensurepip' 2>/dev/null; then
      # Ubuntu leaves it out; a new machine may be updating itself, hence the patience.
      sudo apt-get -o DPkg::Lock::Timeout=600 update
      sudo apt-get -o DPkg::Lock::Timeout=600 install --yes python3-venv
    fi
    python3 -m venv "$home/uv"
    "$home/uv/bin/pip" install uv
  fi
  # torch_xla has wheels up to Python 3.12, and Ubuntu 22.04, which most images are, has 3.10: uv brings one.
  if [[ ! -x $home/venv/bin/python ]]; then "$home/uv/bin/uv" venv --python '>=3.11,<3.13' "$home/venv"; fi
  # The archive of a clone has the versions that its tests were run with.
  if tar -xzOf "$archive" "portable-trainer/$versions" >"$home/constraints.txt" 2>/dev/null; then
    constraints=(--constraints "$home/constraints.txt")
  fi
  "$home/uv/bin/uv" pip install --python "$home/venv/bin/python" --upgrade --reinstall-package portable-trainer \
    ${constraints[@]+"${constraints[@]}"} "$1"
  if [[ $1 == *torchtpu* ]]; then echo tpu; else echo xla; fi >"$home/backend"
}

running() {
  # The command line tells our process from another that was given the same number after a restart.
  [[ -s $home/run.pid ]] && grep -qsaE 'portable-train|worker\.sh' "/proc/$(<"$home/run.pid")/cmdline"
}

state() {
  if [[ ! -x $trainer ]]; then
    echo not-installed
  elif running; then
    echo running
  elif [[ -s $home/run.exit ]]; then
    echo "ended-$(<"$home/run.exit")"
  elif [[ -s $home/run.pid ]]; then
    echo lost
  else
    echo not-started
  fi
}

start() {
  if running; then
    echo "already running"
    return
  fi
  rm -f "$home/run.pid" "$home/run.exit"
  # A session of its own: it must outlive the connection that started it.
  setsid bash "${BASH_SOURCE[0]}" supervise "$@" >>"$home/run.log" 2>&1 </dev/null &
  until [[ -s $home/run.pid ]]; do sleep 0.1; done
  echo "started; the log is $home/run.log"
}

supervise() {
  local code=0 launch=("$trainer")
  printf '\n=== %s\n' "$(date -u)"
  if [[ -f $home/backend && $(<"$home/backend") == tpu ]]; then
    # Of several hosts (TPU_WORKER_HOSTNAMES), torch_tpu says which this is, and torchrun starts its ranks.
    if [[ ${TPU_WORKER_HOSTNAMES-} == *,* ]]; then
      set -a
      eval "$("$home/venv/bin/python" -m torch.tpu.distributed)"
      set +a
      launch=("$home/venv/bin/torchrun" --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node
        "$((WORLD_SIZE / NNODES))" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m portable.cli)
      unset WORLD_SIZE
    fi
    "${launch[@]}" --backend tpu "$@" &
  else
    PJRT_DEVICE=${PJRT_DEVICE:-TPU} "$trainer" --backend xla "$@" &
  fi
  echo $! >"$home/run.pid"
  wait $! || code=$?
  echo "$code" >"$home/run.exit"
}

stop() {
  if running; then kill -TERM "$(<"$home/run.pid")" || true; fi # it may just have ended
  while running; do sleep 1; done
  state
}

status() {
  state
  if [[ -f $home/run.log ]]; then tail -n 1 "$home/run.log"; fi
}

logs() {
  tail -n 100 -F "$home/run.log"
}

case ${1-} in
  install | start | stop | state | status | logs | supervise) "$@" ;;
  *)
    echo "error: ${1:-worker.sh}: use install, start, stop, state, status or logs" >&2
    exit 2
    ;;
esac
