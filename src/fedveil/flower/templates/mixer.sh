#!/bin/sh
# Start the mixer: a party of its own, which sites report to directly, and which must not be the server.
cd "$$(dirname "$$0")" || exit 1
exec fedveil mixer --positions ${positions} --minimum ${minimum} --expected ${clients} \
  --rounds ${rounds} --attempts ${attempts} --deadline ${deadline} --seconds 604800 \
  --host ${listen} --port ${port} --certificate mixer.crt --key mixer.key --clients-ca ca.crt \
  --members members.txt --opened opened.txt
