#!/bin/sh
# Start this site's SuperNode. What it runs is fedveil as it is installed here: bin comes first in the
# PATH, and never runs code that the server sends. Messages are handed to this script's own SuperExec alone,
# by a secret that is new at every start: SuperNode's port is open to whoever can log in to this machine.
umask 077
[ "$$(uname)" = Linux ] || { echo "error: a site forks a process for each message, so it runs on Linux only" >&2; exit 2; }
cd "$$(dirname "$$0")" || exit 1
port=${port} # of this machine alone
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
# a site that cannot be opened does not start; a policy that refuses, perhaps because this run is in it, says so when asked
python3 -m fedveil site check site.toml > check.txt || { code=$$?; [ $$code -eq 1 ] || exit $$code; }
export PATH="$$PWD/bin:$$PATH" FEDVEIL_SITE="$$PWD/site.toml"
rm -f secret && head -c 32 /dev/urandom > secret || exit 1
flower-superexec --insecure --runtime-api-address "127.0.0.1:$$port" --parent-pid $$$$ \
  --superexec-auth-secret-file secret &
exec python3 -m fedveil.flower.flwr_private flower-supernode --superlink ${address} --host 127.0.0.1 --port "$$port" \
  --isolation process --superexec-auth-secret-file secret \
  --root-certificates ca.crt --auth-supernode-private-key "${key}"
