#!/bin/sh
# Run the federation, and show what the server says. After a crash the same command resumes. Exits with 0 when
# the run is done, with 2 if something was refused, and with 1 on anything else.
cd "$$(dirname "$$0")" || exit 1
. ./flower.sh
rm -f outcome.txt
flwr run ../app federation --stream "$$@" || exit 1
[ -f outcome.txt ] || { echo "error: the server's program did not begin: see what SuperLink says" >&2; exit 1; }
{ read -r code && read -r why; } < outcome.txt
[ "$$code" = 0 ] || echo "error: $$why" >&2
exit "$$code"
