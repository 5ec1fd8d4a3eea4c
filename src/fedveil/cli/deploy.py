"""`fedveil deploy` and `mixer`: commands for the operators of a federation on Flower."""

import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.cli import options

if TYPE_CHECKING:  # it needs torch
    from fedveil.flower.deployment import Deployment

_MOST = 20
_FEW_SITES = 10
"""Up to so many sites a note warns of the noise that hides a site. At epsilon 8 and delta 1e-5
their updates, all as long as the clip and in one direction, are at most twice as long as the noise
over all rounds for any model of 70 parameters or more."""


def deploy(
    recipe: Annotated[str, Argument(help="A shipped recipe or a .toml file.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[str | None, Option(help="The sites in order: north,south,east.")] = None,
    demo: Annotated[
        int | None,
        Option(help="Divide the recipe's data among so many sites, and run it all here."),
    ] = None,
    divide: Annotated[
        bool,
        Option("--divide", help="Divide the recipe's data among sites here, to try it by hand."),
    ] = False,
    key: Annotated[
        list[str] | None,
        Option(metavar="NAME=FILE", help="The public key of a site (site init); repeatable."),
    ] = None,
    records: Annotated[
        list[str] | None,
        Option(metavar="NAME=N", help="Records of a site, where the recipe needs them."),
    ] = None,
    people: Annotated[
        list[str] | None,
        Option(metavar="NAME=N", help="People of a site, where the recipe samples people."),
    ] = None,
    test: Annotated[
        str | None, Option(metavar="FILE", help="A public table that the server tests on.")
    ] = None,
    address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Of SuperLink; default: 127.0.0.1:9092.")
    ] = None,
    mixer: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Of the mixer, for a recipe with [shuffle].")
    ] = None,
    deadline: Annotated[
        float | None, Option(help="Seconds that a round waits; default: 600, in a demo 60.")
    ] = None,
    rehearsal: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Records that rounds are made long enough for, where they all take as long; "
            "default: 10,000 without --deadline.",
        ),
    ] = None,
    operator_key: Annotated[
        Path | None, Option(help="The key that signs bundles; default: a new one.")
    ] = None,
    allow_code: options.AllowCode = False,
    set_: options.Set = None,
    data: options.Data = None,
) -> None:
    """Write a recipe as a Flower app: its server, and a signed bundle for each site's owner.

    The whole plan is checked first, as the server and as each site will. Owners make their own keys
    (fedveil site init) and decide on their own (fedveil site join). With --demo or --divide both
    are done here for made-up owners.
    """
    names = _site_names(sites, demo)
    if demo is not None:
        from fedveil.base.platforms import can_fork

        if not can_fork():
            raise BadInput("--demo runs sites on this machine, and sites run on Linux only")
    options.check_path("DIR", folder)
    trial = divide or demo is not None
    given = {"--key": key, "--test": test, "--operator-key": operator_key}
    given |= {"--records": records, "--people": people}
    for option, value in given.items():
        if trial and value is not None:
            raise BadInput(f"{option} is for owners elsewhere: leave out --demo and --divide")
    with options.loading(quiet=False):
        from fedveil.flower import deployment as flower
        from fedveil.flower.one_machine import write_trial

        superlink = flower.Address() if address is None else flower.Address.parse(address)
        if demo is not None and address is None:
            from fedveil.flower.local_federation import free_ports

            port, operators, mixer_port, *site_ports = free_ports(3 + demo)
            superlink = flower.Address(
                port=port, site_ports=tuple(site_ports), operator_port=operators
            )
        chosen = flower.load_for_sites(recipe, set_ or (), len(names), divided=trial)
        if demo is not None and address is None and chosen.shuffle is not None:
            mixer = mixer or f"127.0.0.1:{mixer_port}"
        by_rehearsal = deadline is None
        if deadline is None:
            deadline = 600.0 if demo is None else 60.0
        mixer_address = None if mixer is None else flower.Address.parse(mixer)
        parts: dict[str, Any] = {
            "superlink": superlink,
            "deadline": deadline,
            "rehearsal": rehearsal,
            "default_rehearsal": by_rehearsal,
            "mixer_address": mixer_address,
            "allow_code": allow_code,
        }
        if trial:
            own = chosen.load_data(data)
            deployment = write_trial(folder, chosen, own, names, **parts)
        else:
            flower.check_free(folder)
            flower.check_names(names)
            numbers = [
                _numbers(option, _pairs(option, texts))
                for option, texts in (("--records", records), ("--people", people))
            ]
            keys = _public_keys(names, _pairs("--key", key))
            registered = flower.registered(chosen, names, keys, *numbers)
            chosen, public = flower.public_data(chosen, test, names, data)
            deployment = flower.Deployment(chosen, registered, public, **parts)
            signer = deployment.write_folder(folder, operator_key)
    print(f"written: {folder}/README.md says how to start server and sites")
    if not trial:
        print(f"tell the owners by another way: the bundles are signed by {signer}")
    if deployment.takes_whole_deadline:
        long = f"all of its {deadline:g} s"
        if deployment.chosen_rehearsal is not None:
            long = f"as long as every other, at most {deadline:g} s, by a rehearsal"
        print(f"note: a round takes {long}, so that nobody learns who was asked")
    if not trial and not len(deployment.data.test_y):
        print("note: there is no test split, so nothing is measured (--test names a public table)")
    whole = chosen.noise.claim and chosen.noise.where not in ("training", "site")
    if whole and len(names) <= _FEW_SITES:
        whose = "the one site" if len(names) == 1 else f"each of the {len(names)} sites"
        print(
            f"note: {chosen.name} hides {whose} as a whole, which takes more noise than so few can "
            "outweigh; if protecting each record is enough, deploy dp-sgd or sites"
        )
    if demo is not None:
        _demonstrate(deployment, folder)


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Return the texts NAME=VALUE of an option as a dict. Raises BadInput for others."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise BadInput(f"{option} {shown(text)}: write it as NAME=VALUE")
        if name in pairs:
            raise BadInput(f"{option} names {name!r} twice")
        pairs[name] = value
    return pairs


def _numbers(option: str, pairs: dict[str, str]) -> dict[str, int]:
    """Return the numbers of an option. Raises BadInput for texts that are no number from 1."""
    for name, text in pairs.items():
        if not text.isdecimal() or not int(text):
            raise BadInput(f"{option} {name}={text}: a whole number from 1 is needed")
    return {name: int(text) for name, text in pairs.items()}


def _public_keys(names: Sequence[str], files: dict[str, str]) -> list[str]:
    """Return the public keys of the sites, in order, each read from its file.

    Raises BadInput for a site without a key, a key without a site, and files that cannot be read.
    """
    for name in files:
        if name not in names:
            raise BadInput(f"--key names {name!r}, which is no site: use {', '.join(names)}")
    keys = []
    for name in names:
        if name not in files:
            raise BadInput(
                f"site {name!r} has no key: its owner makes one (fedveil site init) and sends you "
                f"the .pub file (--key {name}=FILE)"
            )
        try:
            keys.append(Path(files[name]).read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as e:
            raise BadInput(f"--key {name}={files[name]} cannot be read: {e}") from e
    return keys


def _site_names(sites: str | None, demo: int | None) -> tuple[str, ...]:
    """Return the sites' names, from --sites or as site-1 and on for a --demo of so many.

    Raises BadInput unless exactly one of both is given.
    """
    if (sites is None) == (demo is None):
        raise BadInput("name the sites (--sites north,south,east), or ask for a --demo of 3")
    if sites is not None:
        return tuple(name.strip() for name in sites.split(","))
    if not 1 <= (demo or 0) <= _MOST:
        raise BadInput(f"--demo is {demo}: 1 to {_MOST} sites on one machine")
    return tuple(f"site-{number + 1}" for number in range(demo or 0))


def _demonstrate(deployment: "Deployment", folder: Path) -> None:
    """Run a deployment on this machine, and print its events and its result."""
    from fedveil.base.interrupts import listen
    from fedveil.console import print_result
    from fedveil.flower.local_federation import LocalFederation, demonstrate

    listen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all is stopped then too
    url = f"https://{deployment.superlink}"
    with closing(demonstrate(folder, url, deployment.site_names)) as events:
        for event in events:
            print(event, flush=True)
    result = LocalFederation(folder).read_result()
    assert result is not None
    print_result(options.plain_console(), result)


def mixer(
    positions: Annotated[int, Option(help="Weights per report.")],
    minimum: Annotated[int, Option(help="Fewest reports that are handed on.")],
    expected: Annotated[int, Option(help="Reports after which a round closes.")],
    rounds: Annotated[int, Option(help="Rounds to serve.")] = 1,
    deadline: Annotated[float, Option(help="Seconds a round stays open.")] = 60.0,
    idle: Annotated[float, Option(help="Seconds a client may be silent.")] = 30.0,
    seconds: Annotated[float, Option(help="Seconds after which it stops.")] = 3600.0,
    attempts: Annotated[int, Option(help="Attempts at each round, at most.")] = 1,
    host: Annotated[str, Option(help="IP address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0: any.")] = 0,
    certificate: Annotated[str | None, Option(help="Its certificate, for TLS.")] = None,
    key: Annotated[str | None, Option(help="The certificate's private key.")] = None,
    clients_ca: Annotated[
        str | None, Option(help="The authority that signs members' certificates.")
    ] = None,
    members: Annotated[Path | None, Option(help="File of the members' names, one a line.")] = None,
    opened: Annotated[
        str | None, Option(help="File for the rounds that were opened: none opens twice.")
    ] = None,
    simulated: Annotated[
        bool, Option("--simulated", help="Do without members, for simulations on this machine.")
    ] = False,
) -> None:
    """Run a mixer for two-point reports: it hands on, per position, only how many were high."""
    settings = locals()  # the options are the fields of MixerConfig
    from fedveil.mixing.mixer import MixerConfig, run_mixer

    settings["members"] = () if members is None else tuple(members.read_text().split())
    run_mixer(MixerConfig(**settings))
