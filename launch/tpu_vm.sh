#!/usr/bin/env bash
# Runs a kimi-jax command on all workers of a Cloud TPU VM slice:
#
#   TPU=my-slice ZONE=us-east5-a launch/tpu_vm.sh generate /mnt/kimi-k3 --mesh data=4,tensor=16 --prompt-ids 1 2
#
# TPU, ZONE  the slice and where it is
# PROJECT    the cloud project (default: gcloud's)
# SETUP      run first on every worker, e.g. to activate an environment (default: . ~/.venv/bin/activate)
# PORT       process 0 listens there (default: 8476)
#
# Every worker asks the machine's metadata which one it is and who the others are. Where one ends with an error, the
# others say which and end within a minute, and gcloud's code is not zero; interrupting this script ends them.
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${TPU:-}" ] || [ -z "${ZONE:-}" ]; then
  echo "usage: TPU=NAME ZONE=ZONE $0 COMMAND [ARGUMENTS …]" >&2
  exit 2
fi
printf -v command ' %q' "$@"
setup=${SETUP:-. ~/.venv/bin/activate}
port=${PORT:-8476}

# Quoted: expands on the workers. An endpoint is a host name, or name:id:address.
# shellcheck disable=SC2016
place='metadata() { curl -sSf -H "Metadata-Flavor: Google" \
  "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"; }
endpoints=$(metadata worker-network-endpoints) && KIMI_PROCESS_ID=$(metadata agent-worker-number) || exit 1
first=${endpoints%%,*}
commas=${endpoints//[^,]/}
export KIMI_PROCESS_ID KIMI_PROCESS_COUNT=$((${#commas} + 1)) KIMI_COORDINATOR=${first##*:}:$port'

# A terminal (-t) makes the remote program end when the connection does.
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" ${PROJECT:+--project "$PROJECT"} --worker=all \
  --ssh-flag=-tt --command "$setup; port=$port; $place; kimi-jax$command"
