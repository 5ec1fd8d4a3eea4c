"""Ctrl-C in a notebook: the cell ends with what there is, and the run can be resumed."""

import subprocess
import time

import pytest
from jupyter_client.manager import start_new_kernel

CODE = """
import fedveil as fv
settings = {"rounds": 100000, "noise.multiplier": 30.0, "budget.epsilon": 1e6, "data.clients": 20}
run = fv.run("central", out=OUT, set={**settings, "engine.workers": 2})
print(run.result["stopped"], run.result["rounds"])
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_interrupting_the_kernel_ends_the_run_cleanly(tmp_path):
    manager, client = start_new_kernel(cwd=str(tmp_path), stderr=subprocess.DEVNULL)
    try:
        asked = client.execute(CODE.replace("OUT", repr(str(tmp_path / "run"))))
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoint").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        manager.interrupt_kernel()
        said = []
        while True:
            message = client.get_iopub_msg(timeout=60)
            assert message["msg_type"] != "error", message["content"]
            if message["msg_type"] == "stream":
                said.append(message["content"]["text"])
            ours = message["parent_header"].get("msg_id") == asked
            if ours and message["content"].get("execution_state") == "idle":
                break
        word, rounds = "".join(said).split()[-2:]
        assert word == "interrupted"
        assert int(rounds) >= 1
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
