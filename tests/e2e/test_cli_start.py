"""What happens before the first round: a word at once, and nothing that it does not need."""

import os
import pty
import subprocess
import sys

import pytest

SETTINGS = ("rounds=1", "noise.multiplier=2.0", "budget.epsilon=inf", "engine.workers=1")
DEMO = ["run", *(part for setting in SETTINGS for part in ("--set", setting))]
HIDE_CURSOR = "\x1b[?25l"
HEAVY = "{'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'dp_accounting'}"


def run_code(code, arguments, folder):
    """Run the command line in a process of its own, after `code`."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.argv = ['fedveil', *{arguments!r}]\n"
            f"from fedveil.cli.main import main\n{code}main()\n",
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode in (0, 2), done.stderr
    return done.stdout, done.returncode


def on_a_terminal(*arguments, folder, until=None):
    """What the command writes to a terminal, up to a word if one is given, and its exit code."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedveil", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        cwd=folder,
    )
    os.close(writer)
    told = b""
    try:
        while piece := os.read(reader, 1 << 16):
            told += piece
            if until is not None and until in told:
                process.kill()
                break
    except OSError:  # how Linux says that nobody writes any more
        pass
    os.close(reader)
    return told.decode(), process.wait()


def test_the_word_comes_before_anything_heavy_is_imported(tmp_path):
    code = (
        "class Terminal:\n"
        "    def isatty(self): return True\n"
        "    def flush(self): pass\n"
        "    def fileno(self): return 2\n"
        "    def write(self, text):\n"
        "        if 'loading' in text:\n"
        f"            sys.__stdout__.write(repr({HEAVY} & set(sys.modules)))\n"
        "        return len(text)\n"
        "sys.stderr = Terminal()\n"
    )
    assert run_code(code, ["run", "--set", "rounds=0"], tmp_path) == ("set()", 2)


@pytest.mark.slow
def test_what_draws_and_what_compiles_is_not_imported_before_the_first_round(tmp_path):
    code = (
        "from fedveil import console\n"
        "def round_text(run, line, seconds_left):\n"
        "    late = {'matplotlib', 'torch._dynamo', 'tensorboard', 'mlflow', 'wandb'}\n"
        "    assert 'torch' in sys.modules and not late & set(sys.modules)\n"
        "    print('a round', flush=True)\n"
        "    os._exit(0)\n"
        "import os\n"
        "console.round_text = round_text\n"
    )
    assert run_code(code, DEMO, tmp_path) == ("a round\n", 0)


@pytest.mark.slow
def test_the_word_is_gone_when_the_run_begins(tmp_path):
    told, _ = on_a_terminal(*DEMO, folder=tmp_path, until=b"round 1/1")
    beginning, _, rest = told.partition("people: ")
    steps = (
        "loading libraries",
        "reading data",
        "building the model",
        "solving for the noise",
    )
    shown = [part.strip() for part in beginning.removesuffix(HIDE_CURSOR).split("\r")]
    assert shown == [*(f"{step} ..." for step in (*steps, "trying the model")), "", ""]
    assert not any(step in rest for step in steps)


def test_the_word_is_gone_when_the_run_is_refused(tmp_path):
    told, code = on_a_terminal("run", "--set", "rounds=0", folder=tmp_path)
    assert code == 2
    assert told.startswith(f"loading libraries ...\r{' ' * 21}\rerror: ")
    assert told.count("\n") == 1


def test_quiet_on_a_terminal(tmp_path):
    told, code = on_a_terminal("run", "--set", "rounds=0", "--quiet", folder=tmp_path)
    assert code == 2
    assert told.startswith("error: ")


def test_account_imports_neither_torch_nor_what_takes_long(tmp_path):
    code = (
        "import atexit\n"
        "late = {'torch', 'sklearn', 'matplotlib', 'dp_accounting', 'pandas', 'scipy.signal',\n"
        "        'scipy.stats', 'scipy.optimize', 'scipy.integrate', 'scipy.interpolate'}\n"
        "atexit.register(lambda: print('imported:', sorted(late & set(sys.modules))))\n"
    )
    for options in (
        ["--epsilon", "8", "--rate", "0.5", "--rounds", "3"],
        ["--noise", "1", "--rate", "0.1", "--epsilon", "2", "--units", "2"],
    ):
        told, status = run_code(code, ["account", "--delta", "1e-3", *options], tmp_path)
        assert status == 0
        assert "(zero-out, central trust, RDP, secure noise)" in " ".join(told.split())
        assert told.endswith("imported: []\n")
