"""`fedveil deploy`, `mixer` and `site`: commands for a federation on Flower."""

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.cli import options

if TYPE_CHECKING:  # it needs torch
    from fedveil.flower.deployment import Deployment

_MOST = 20
_FEW_SITES = 10
"""Up to so many sites a note warns of the noise that hides a site. At epsilon 8 and delta 1e-5
their updates, all as long as the clip and in one direction, are at most twice as long as the noise
over all rounds for any model of 70 parameters or more."""

site = typer.Typer(
    name="site", help="For the owner of a site in a federation.", no_args_is_help=True
)

File = Annotated[Path, Argument(metavar="SITE.toml", help="What the owner says of the site.")]


def deploy(
    recipe: Annotated[str, Argument(help="A shipped recipe or a .toml file.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[
        str | None, Option(help="Names of the sites, in order: north,south,east.")
    ] = None,
    demo: Annotated[
        int | None,
        Option(help="Divide the recipe's data among so many sites, and run it all here."),
    ] = None,
    divide: Annotated[
        bool, Option("--divide", help="Divide the recipe's data among the sites.")
    ] = False,
    address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Of SuperLink; default: 127.0.0.1:9092.")
    ] = None,
    mixer: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Of the mixer, for a recipe with [shuffle].")
    ] = None,
    deadline: Annotated[
        float | None, Option(help="Seconds that a round waits; default: 600, in a demo 60.")
    ] = None,
    set_: options.Set = None,
    data: options.Data = None,
) -> None:
    """Write a recipe as a Flower app: its server, its sites, their keys, how to start them."""
    names = _site_names(sites, demo)
    if demo is not None:
        from fedveil.base.platforms import can_fork

        if not can_fork():
            raise BadInput("--demo runs sites on this machine, and sites run on Linux only")
    options.check_path("DIR", folder)
    with options.loading(quiet=False):
        from fedveil.flower.deployment import Address, Deployment, load_for_sites

        chosen = load_for_sites(recipe, set_ or (), len(names))
        superlink = Address() if address is None else Address.parse(address)
        if demo is not None and address is None:
            from fedveil.flower.local_federation import free_ports

            port, operators, mixer_port, *site_ports = free_ports(3 + demo)
            superlink = Address(port=port, site_ports=tuple(site_ports), operator_port=operators)
            mixer = mixer or f"127.0.0.1:{mixer_port}"
        trial_data = chosen.load_data(data) if divide or demo is not None else None
        if deadline is None:
            deadline = 600.0 if demo is None else 60.0
        mixer_address = None if mixer is None else Address.parse(mixer)
        deployment = Deployment(chosen, names, superlink, trial_data, deadline, mixer_address)
        deployment.write(folder)
    print(f"written: {folder}/README.md says how to start server and sites")
    if deployment.takes_whole_deadline:
        print(f"note: a round takes all of its {deadline:g} s, so that nobody learns who was asked")
    if chosen.noise.claim and chosen.noise.where != "training" and len(names) <= _FEW_SITES:
        whose = "the one site" if len(names) == 1 else f"each of the {len(names)} sites"
        print(
            f"note: {chosen.name} hides {whose} as a whole, which takes more noise than so few can "
            "outweigh; if protecting each record is enough, deploy dp-sgd"
        )
    if demo is not None:
        _demonstrate(deployment, folder)


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
    members: Annotated[
        Path | None, Option(help="File with the members' names, one per line.")
    ] = None,
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


@site.command()
def check(path: File, json_: options.Json = False) -> int:
    """Print what taking part would cost, whom the site trusts, and what leaves it.

    Exits with 1 if the policy refuses to take part.
    """
    with options.loading(quiet=json_):
        from fedveil.flower.site import Site
        from fedveil.flower.site_check import report_lines, site_report

        opened = Site.open(path)
        report = site_report(opened)
    print(json.dumps(report, indent=2) if json_ else "\n".join(report_lines(opened, report)))
    return 0 if report["takes_part"] else 1


@site.command()
def accept(path: File) -> None:
    """Accept the site's ledger as complete after its witness file was lost."""
    from fedveil.flower.federation_files import read_site_file
    from fedveil.flower.site_ledger import SiteLedger

    head = SiteLedger.from_site_file(read_site_file(path)).accept()
    print(f"accepted: {head.length} entries, head {head.hash}:{head.length}")


@site.command()
def doctor(path: File, json_: options.Json = False) -> int:
    """Check versions, files, ledger, policy, guard, key, certificates, clock and SuperLink.

    Exits with 1 if a check fails.
    """
    with options.loading(quiet=json_):
        from fedveil.flower.site_doctor import examine

        findings = list(examine(path))
    if json_:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        print("\n".join(map(str, findings)))
    return 1 if any(finding.passed is False for finding in findings) else 0


@site.command()
def status(path: File, json_: options.Json = False) -> None:
    """Print which runs the site took part in, what they cost, and the last lines of its log."""
    with options.loading(quiet=json_):
        from fedveil.flower.site_doctor import site_status, status_lines

        found = site_status(path)
    print(json.dumps(found, indent=2) if json_ else "\n".join(status_lines(found)))
