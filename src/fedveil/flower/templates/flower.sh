# For the scripts beside it: what is Flower's stays in this folder, and nothing is sent home. The programs in
# bin show the operators' token.
umask 077
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export PATH="$$PWD/bin:$$PATH" FEDVEIL_OPERATOR_TOKEN="$$PWD/operator.token"
mkdir -p flower
cat > flower/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "${operators}"
root-certificates = '$$PWD/certificates/ca.crt'
END
