#!/usr/bin/env bash
# Cloud TPU: bash @file@ ZONE (with --print after it: the commands, without running any)
# It stays in the foreground and keeps the run going through preemptions: docs/tpu.md. What was trained is in
# @output@.
set -euo pipefail

zone=${1:?give a zone, such as us-west4-a}
shift
exec @cloud@ keep --name @name@ --zone "$zone" --type @tpu_type@@spot_flag@ --backend @backend@ \
  --package '@package@' --config @config@ --output-dir @output@ "$@"
