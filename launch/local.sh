#!/usr/bin/env bash
# Runs a kimi-jax command as N processes of M CPU devices each on this machine:
#
#   launch/local.sh 2 4 generate tiny-k3 --mesh data=2,tensor=4 --prompt-ids 1 2 3
#
# The processes meet on the loopback interface and exchange arrays by gloo. Where one ends with an error, a line says
# which, the others may say their last word and are ended too; the exit code is that of the first.
#
# KIMI_JAX   the program, split at spaces (default: kimi-jax)
# KIMI_PORT  process 0 listens there (default: a free port)
# KIMI_GRACE seconds that the others have to end by themselves (default: 10)
set -u

if [ $# -lt 3 ] || ! [[ "$1" =~ ^[1-9][0-9]*$ && "$2" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 PROCESSES DEVICES_EACH COMMAND [ARGUMENTS …]" >&2
  exit 2
fi
processes=$1 devices=$2
shift 2
read -r -a program <<<"${KIMI_JAX:-kimi-jax}"
grace=${KIMI_GRACE:-10}
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=${KIMI_PORT:-$("${PYTHON:-python3}" -c "$free_port")} || exit 1

export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$devices
export KIMI_COORDINATOR=127.0.0.1:$port KIMI_PROCESS_COUNT=$processes
if [ -n "${http_proxy:-}${https_proxy:-}${grpc_proxy:-}" ]; then
  export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
fi

pids=() states=()

end_all() { # end_all SIGNAL
  for i in "${!pids[@]}"; do
    [ "${states[i]}" = running ] && kill "-$1" "${pids[i]}" 2>/dev/null
  done
}

for ((i = 0; i < processes; i++)); do
  KIMI_PROCESS_ID=$i "${program[@]}" "$@" </dev/null &
  pids+=($!) states+=(running)
done
trap 'end_all TERM; exit 130' INT
trap 'end_all TERM; exit 143' TERM

code=0 running=$processes deadline=0
while [ "$running" -gt 0 ]; do
  for i in "${!pids[@]}"; do
    if [ "${states[i]}" = running ] && ! kill -0 "${pids[i]}" 2>/dev/null; then
      wait "${pids[i]}" 2>/dev/null
      ended=$?
      states[i]=$ended running=$((running - 1))
      if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then
        code=$ended deadline=$((SECONDS + grace))
        echo "launch/local.sh: process $i (pid ${pids[i]}) ended with code $ended; the others are ended too" >&2
      fi
    fi
  done
  if [ "$code" -ne 0 ] && [ "$running" -gt 0 ]; then
    if [ "$SECONDS" -ge $((deadline + 5)) ]; then
      end_all KILL
    elif [ "$SECONDS" -ge "$deadline" ]; then
      end_all TERM
    fi
  fi
  [ "$running" -gt 0 ] && sleep 0.1
done
exit "$code"
