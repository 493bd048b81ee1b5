#!/usr/bin/env bash
# Hugging Face Jobs: bash @file@ (with --dry-run it shows the job and starts none)
# A job that ends is tried again; the run goes on from its newest checkpoint in @output@. Keys are
# taken from where this script is called.
set -euo pipefail

exec hf jobs run --name @name@ --flavor @flavor@ --timeout 7d --attempts 10 --detach \
@secrets@
  --env RUN_YAML="$(cat @config@)" "$@" \
  python:3.12 bash -ec 'printf "%s" "$RUN_YAML" >run.yaml
    pip install -q "@package@"
    exec @command@ --config run.yaml --output_dir @output@'
