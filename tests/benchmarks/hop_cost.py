"""What one item costs the host at each stage that it passes: pipeflow, aiostream, SPDL, bare queues.

    python tests/benchmarks/hop_cost.py --full --json out.json

All run in this one process, in turn and `--repeats` times round, so that a busy machine is unkind to all
alike. The table goes to stdout, progress to stderr. The contenders' code and settings: hop_contenders.py.
`--full` adds the runs of 1,000 and 1,000,000 items, with the resident memory on the way (about 5 minutes).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hop_contenders import CONTENDERS, Case, Contender, Reading, Skipped, measure

TARGET = 25.0
"""Microseconds a hop on uvloop that pipeflow may cost."""

LOOPS = ("asyncio", "uvloop")
QUEUES = (16, 4)
FEW, MANY = 1_000, 1_000_000
AT_SCALE = ("pipeflow", "asyncio.Queue")

MEMORY = ("before", "tenth", "end", "growth")
TWICE = f"{'median':>7} {'min':>7}"

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    skipped: dict[str, str] = {}
    load_before = load()
    began = time.time()
    rows = compare(options, skipped)
    scale = at_scale(options, skipped) if options.full else []
    words = sys.argv[1:] if arguments is None else arguments
    report = {
        "benchmark": "hop_cost",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "command": " ".join(["python tests/benchmarks/hop_cost.py", *words]),
        "seconds": round(time.time() - began, 1),
        "versions": versions(),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": load_before,
            "load_after": load(),
        },
        "settings": {c.name: c.settings for c in CONTENDERS},
        "items": options.items,
        "hops": options.hops,
        "repeats": options.repeats,
        "target_us": TARGET,
        "rows": rows,
        "scale": scale,
        "skipped": skipped,
    }
    print(table(report))
    if options.json:
        write_whole(options.json, json.dumps(report, indent=2) + "\n")
    return report


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=count, default=5_000, help="items in each run (default: %(default)s)")
    parser.add_argument(
        "--hops", type=count, default=4, help="stages behind the source (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=count, default=5, help="runs of each line (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look: 500 items, one run, queues of 16 only")
    parser.add_argument("--full", action="store_true", help="also 1,000 and 1,000,000 items, with memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.items, options.repeats = 500, 1
    return options


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


# Runs ----------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, skipped: dict[str, str]) -> list[Row]:
    """Every contender on every loop, with each size of queue that makes a difference to it."""
    plan = [
        (contender, Case(options.items, options.hops, queue, loop))
        for queue in (QUEUES[:1] if options.quick else QUEUES)
        for loop in LOOPS
        for contender in CONTENDERS
        if contender.queued or queue == QUEUES[0]
    ]
    # The first run of each pays for imports and caches; it does not count.
    if not options.quick:
        repeat([(c, Case(200, options.hops, k.queue, k.loop)) for c, k in plan], 1, skipped)
    readings = repeat(plan, options.repeats, skipped)
    return [row(*entry, readings[entry]) for entry in plan if entry in readings]


def at_scale(options: argparse.Namespace, skipped: dict[str, str]) -> list[Row]:
    """Few items and many: the cost must be the same, and memory flat."""
    chosen = [c for c in CONTENDERS if c.name in AT_SCALE]
    few = [(c, Case(FEW, options.hops, QUEUES[0], loop)) for loop in LOOPS for c in chosen]
    many = [(c, Case(MANY, options.hops, QUEUES[0], loop, memory=True)) for loop in LOOPS for c in chosen]
    readings = repeat(few, options.repeats, skipped) | repeat(many, 1, skipped)
    return [row(*entry, readings[entry]) for entry in few + many if entry in readings]


def repeat(
    plan: list[tuple[Contender, Case]], times: int, skipped: dict[str, str]
) -> dict[tuple[Contender, Case], list[Reading]]:
    """Run the plan so many times round. What cannot run here is left out, and `skipped` says why."""
    readings: dict[tuple[Contender, Case], list[Reading]] = {}
    for number in range(times):
        for contender, case in plan:
            where = f"{contender.name} on {case.loop}"
            if where in skipped:
                continue
            if case.items == MANY or sys.stderr.isatty():
                print(
                    f"{number + 1}/{times} {where}, queue {case.queue}, {case.items:,} items", file=sys.stderr
                )
            try:
                reading = measure(contender, case)
            except Skipped as reason:
                skipped[where] = str(reason)
                print(f"skipped: {where}: {reason}", file=sys.stderr)
            else:
                readings.setdefault((contender, case), []).append(reading)
    return readings


def row(contender: Contender, case: Case, readings: list[Reading]) -> Row:
    def both(name: str) -> dict[str, float]:
        values = [getattr(reading, name) for reading in readings]
        return {"median": round(statistics.median(values), 3), "min": round(min(values), 3)}

    return {
        "contender": contender.name,
        "loop": case.loop,
        "queue": case.queue if contender.queued else None,
        "items": case.items,
        "hops": case.hops,
        "runs": len(readings),
        "wall_us": both("wall"),
        "cpu_us": both("cpu"),
        "ends_ms": both("ends"),
        "memory_mib": {key: round(value, 2) for key, value in readings[-1].memory.items()} or None,
    }


# Report --------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    lines = [
        "Host cost of an item a hop, behind an async source, through stages that do nothing:"
        f" {report['items']:,} items, {report['hops']} hops, {report['repeats']} runs",
        f"{report['date']}; {machine['system']} {machine['processor']}, {machine['cores']} cores;"
        f" load {machine['load_before']} before, {machine['load_after']} after",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "",
        f"{'':21} {'':8} {'queue':>5}  {'wall us a hop':>15}  {'CPU us a hop':>15}  {'ends ms':>8}",
        f"{'contender':21} {'loop':8} {'items':>5}  {TWICE}  {TWICE}  {'median':>8}",
    ]
    for r in report["rows"]:
        queue = "-" if r["queue"] is None else str(r["queue"])
        ends = r["ends_ms"]["median"]
        lines.append(f"{r['contender']:21} {r['loop']:8} {queue:>5}  {figures(r)}  {ends:8.1f}")
    lines += ["", "Settings", *(f"  {name:21} {text}" for name, text in settings.items())]
    if report["scale"]:
        lines += [
            "",
            f"Few items and many, queue {QUEUES[0]} (resident memory in MiB; growth: the most after a tenth)",
            f"{'':21} {'':8} {'':>9}  {'wall us a hop':>15}  {'CPU us a hop':>15}  {'memory':>7}",
            f"{'contender':21} {'loop':8} {'items':>9}  {TWICE}  {TWICE} "
            + "".join(f" {name:>7}" for name in MEMORY),
            *(scale_line(r) for r in report["scale"]),
        ]
    lines += ["", verdict(report)]
    lines += [f"skipped: {where}: {reason}" for where, reason in report["skipped"].items()]
    return "\n".join(lines)


def figures(r: Row) -> str:
    wall, cpu = r["wall_us"], r["cpu_us"]
    return f"{wall['median']:7.2f} {wall['min']:7.2f}  {cpu['median']:7.2f} {cpu['min']:7.2f}"


def scale_line(r: Row) -> str:
    memory = r["memory_mib"]
    seen = "".join(f" {memory[name]:7.1f}" for name in MEMORY) if memory else ""
    return f"{r['contender']:21} {r['loop']:8} {r['items']:>9,}  {figures(r)} {seen}".rstrip()


def verdict(report: dict[str, Any]) -> str:
    """Pipeflow on uvloop against the target, by the median of wall time at the queue size that is worse."""
    ours = [r for r in report["rows"] if (r["contender"], r["loop"]) == ("pipeflow", "uvloop")]
    target = f"Target of {TARGET:g} us a hop on uvloop"
    if not ours:
        return f"{target}: not measured"
    wall, cpu = (max(r[key]["median"] for r in ours) for key in ("wall_us", "cpu_us"))
    met = "met" if wall <= TARGET else "missed"
    return f"{target}: {met} (worst medians: wall {wall:.2f}, CPU {cpu:.2f})"


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in ("pipeflow", "uvloop", "aiostream", "spdl-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "pipeflow" not in found:
        import pipeflow

        found["pipeflow"] = pipeflow.__version__
    return found


def load() -> float | None:
    """Processes that wanted a core, over the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def write_whole(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


if __name__ == "__main__":
    main()
