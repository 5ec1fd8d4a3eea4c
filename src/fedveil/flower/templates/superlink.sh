#!/bin/sh
# Start the SuperLink. state.db keeps the sites and runs that it knows: start it again, and sites come back by
# themselves. Models and reports are in its memory alone. Sites connect to port ${port}, where nothing else is
# answered; operators, and SuperLink's own programs, to ${operators}, with the token in operator.token.
umask 077
cd "$$(dirname "$$0")" || exit 1
[ -s operator.token ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > operator.token
. ./flower.sh
exec python3 -m fedveil.flower.flwr_private flower-superlink --sites ${listen}:${port} --operators ${operators} \
  --answer-bytes ${bytes} --database state.db \
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/superlink.crt \
  --ssl-keyfile certificates/superlink.key --enable-supernode-auth \
  --disable-runtime-dependency-installation
