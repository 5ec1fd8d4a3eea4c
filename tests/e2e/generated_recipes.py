"""Recipe number i of a seed: whole if i is odd, and with something wrong about it if i is even."""

import json
import math
import random
from pathlib import Path
from typing import get_args

from fedveil.data import load as data_module
from fedveil.runs.recipe import Recipe
from tests.e2e.whole_recipes import whole

HOSTILE = (
    0,
    -1,
    1,
    3,
    10**9,
    10**12,
    10**15,
    10**18,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.0,
    1e308,
    1e-308,
    5e-324,
    1e-17,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "",
    "none",
    "inf",
    "../../etc",
    "/etc",
    "a/b",
    "..",
    ".",
    "~",
    "\0",
    "\x1b[31mred",
    "two\nlines",
    "\u202egnp",
    "\U0001f4a9",
    "%s{0}[bold]",
    "x" * 5000,
    [],
    [10**9],
    [10**9, 10**9],
    [1] * 3000,
    [-1],
    [0],
    [math.nan],
    [1.0, 2.0],
    ["a"],
    [[]],
    {},
    {"kind": "none"},
    {"a": {"b": {"c": 1}}},
)


def keys(annotation):
    """The keys of a section, of whatever kind."""
    found = {}
    for kind in get_args(annotation) or (annotation,):
        found |= getattr(kind, "model_fields", None) or dict.fromkeys(
            () if kind is annotation or isinstance(kind, type) else keys(kind)
        )
    return tuple(found)


KEYS = {
    name: keys(field.annotation)
    for name, field in Recipe.model_fields.items()
    if keys(field.annotation) and name != "engine"
}
KEYS["engine"] = ("mode", "timings", "chunk", "memory", "checkpoint")  # no thousand workers
TOP = tuple(name for name in Recipe.model_fields if name not in KEYS)


def damage(r, recipe):
    """One thing about a recipe that is out of order, in place."""
    section = r.choice([name for name in recipe if isinstance(recipe[name], dict)])
    match r.randrange(8):
        case 0 | 1 | 2:  # any value for a key that is there
            recipe[section] = {**recipe[section]}
            if recipe[section]:
                recipe[section][r.choice(list(recipe[section]))] = r.choice(HOSTILE)
        case 3:  # any value for a key that there may be
            section = r.choice(list(KEYS))
            there = recipe.get(section)
            there = there if isinstance(there, dict) else {}
            recipe[section] = {**there, r.choice(KEYS[section]): r.choice(HOSTILE)}
        case 4:
            recipe[r.choice(TOP)] = r.choice(HOSTILE)
        case 5:
            recipe[r.choice([*recipe, "colour", "größe"])] = r.choice(HOSTILE)
        case 6:
            del recipe[r.choice(list(recipe))]
        case _:  # a section of another recipe
            other = whole(r)
            name = r.choice(["data", "sample", "client", "clip", "noise", "budget", "server"])
            if name in other:
                recipe[name] = other[name]


def text_of(value):
    """TOML for anything, also for what `fedveil.runs.toml` never has to write."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case int():
            return hex(value) if value > 10**300 else str(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(text_of(v) for v in value) + "]"
    return "{" + ", ".join(f"{quoted(k)} = {text_of(v)}" for k, v in value.items()) + "}"


def quoted(key):
    return json.dumps(key, ensure_ascii=False)


def written(recipe):
    tables = {k: v for k, v in recipe.items() if isinstance(v, dict)}
    lines = [f"{quoted(k)} = {text_of(v)}" for k, v in recipe.items() if k not in tables]
    for name, table in tables.items():
        lines += [f"[{quoted(name)}]", *(f"{quoted(k)} = {text_of(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def mangled(r, text):
    """Bytes that are a recipe no longer, or one with something strange about it."""
    content = text.encode()
    match r.randrange(15):
        case 0:
            return b""
        case 1:
            return content[: r.randrange(len(content))]
        case 2:
            at = r.randrange(len(content))
            return content[:at] + bytes([r.randrange(256)]) + content[at + 1 :]
        case 3:
            lines = text.splitlines()
            return "\n".join([*lines, r.choice(lines)]).encode()  # a key or table twice
        case 4:
            return content + b"[data]\nname = 'digits'\n"
        case 5:
            return b"x = " + b"[" * 20_000 + b"]" * 20_000 + b"\n" + content
        case 6:
            return b"x = " + b"{a=" * 5_000 + b"1" + b"}" * 5_000 + b"\n" + content
        case 7:
            return b".".join([b"a"] * 20_000) + b" = 1\n" + content
        case 8:
            return b"#" * 1_000_000 + b"\n" + content
        case 9:
            return b"".join(b"k%d = 1\n" % i for i in range(100_000))[:1_000_000] + content
        case 10:
            return b"seed = " + b"9" * 5_000 + b"\n" + content.replace(b'"seed"', b'"sead"')
        case 11:
            return content.replace(b'"rounds" =', b'"rounds" = 0x' + b"f" * 9_000 + b" #")
        case 12:
            stamp = r.choice([b"1979-05-27", b"07:32:00", b"1979-05-27T07:32:00Z"])
            return content.replace(b'"seed" =', b'"seed" = ' + stamp + b" #")
        case 13:
            return text.encode("utf-16")
        case _:
            return b"\xef\xbb\xbf" + content.replace(b"\n", r.choice([b"\r\n", b"\r", b"\0\n"]))


SETTINGS = (
    "rounds=",
    "=",
    "name=a=b",
    "data.clients.x=1",
    "name=../../x",
    "name=\udcff",
    "data.name=\udcff",
    "colour\udcff=1",
    "rounds=1\nseed=5",
    "seed=" + "9" * 5000,
    "seed=0x" + "f" * 9000,
    "model.hidden=" + "[" * 20_000,
    "seed=1979-05-27",
    "sample=none",
    "noise={kind='none'}",
    "rounds=2 # more",
)


OVERSIZED = (
    ("model.name=mlp", "model.hidden=[1000000000]"),
    ("model.name=mlp", "model.hidden=[100000, 100000]"),
    ("model.name=mlp", "model.hidden=[" + "1, " * 3000 + "1]"),
    ("data.clients=1000000000000",),
    ("data.resample=1000000000000",),
    ("rounds=1000000000000000",),
    ("rounds=none", "iterations=1000000000000000000", "client.kind=sgd", "client.steps=1"),
    ("client.kind=sgd", "client.lr=0.1", "client.steps=1000000000000"),
    ("client.kind=sgd", "client.lr=0.1", "client.epochs=1000000000000"),
    ("sample.kind=fixed", "sample.size=1000000000000000000"),
    ("sample.kind=round-robin", "sample.size=1000000000000000000"),
    ("data.partition=shards", "data.shards_per_client=1000000000000"),
    ("engine.workers=1000000000",),
    ("seed=9223372036854775808",),
    ("data.seed=-1",),
    ("name=../../x",),
    ("name=/etc/x",),
    ("name=.",),
    ("data=none", "data.name=saved", "data.path=../../etc"),
)


def generated(seed, number):
    """Recipe `number`: whether it is meant to be whole, its bytes and its --set arguments."""
    if seed == "oversized":
        recipe = Path(data_module.__file__).parent.parent / "recipes/central.toml"
        settings = ("budget.epsilon=inf", "noise.multiplier=2.0", *OVERSIZED[number])
        return False, recipe.read_bytes(), [part for s in settings for part in ("--set", s)]
    r = random.Random(f"{seed}/{number}")
    recipe = whole(r)
    if number % 2:
        return True, written(recipe).encode(), []
    how = r.random()
    if how < 0.15:
        return False, mangled(r, written(recipe)), []
    if how < 0.25:
        return False, written(recipe).encode(), ["--set", r.choice(SETTINGS)]
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        damage(r, recipe)
    return False, written(recipe).encode(), []
