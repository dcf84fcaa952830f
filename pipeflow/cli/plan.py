"""`pipeflow plan`: how fast a pipeline would run, found by running it in virtual time."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from pipeflow.cli.common import pipeline_file, show, valid_overrides

if TYPE_CHECKING:
    from pipeflow.plan import Plan

__all__ = ["as_text", "command"]


@click.command("plan", short_help="Simulate a pipeline: seconds a step, busy devices, the bottleneck.")
@click.argument("file", metavar="FILE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--steps", type=click.IntRange(min=2), default=200, show_default=True, help="How many.")
@click.option("--profile", metavar="PATH", help="Costs of stages: the profile.json of a real run.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the simulated delays.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    file: str, overrides: tuple[str, ...], steps: int, profile: str | None, seed: int, as_json: bool
) -> None:
    """Simulate a pipeline: the very engine, each stage as long as `sim:` in the file (or a profile) says.

    A step is one call of the stage named in `run.step`. No GPU is needed, and no time passes but virtual.

    \b
    pipeflow plan examples/replay_four_gpus.yaml
    pipeflow plan pipeline.yaml --profile runs/NAME/profile.json --json
    """
    path, given = pipeline_file(file), valid_overrides(overrides)
    from pipeflow.check import check
    from pipeflow.plan import plan, read_profile

    report = check(path, given)
    show(report.diagnostics, err=True)
    if report.errors:
        sys.exit(1)
    found = plan(report, steps=steps, profile=read_profile(profile) if profile else None, seed=seed)
    click.echo(json.dumps(found.as_json()) if as_json else as_text(found), nl=as_json)


def as_text(found: Plan) -> str:
    """Lines for people."""
    span = f"of {found.steps}, in {found.seconds:.4g} virtual s"
    lines = [f"{found.seconds_per_step:.4g} s a step ({span})", ""]
    width = max((len(name) for name in (*found.devices, *found.stages)), default=0)
    for name, device in found.devices.items():
        size = f"{device.peak_bytes / 2**30:.3g} GiB" if device.peak_bytes else "-"
        lines.append(f"{name:<{width}}  busy {device.busy:>6.1%}  outputs at most {size}")
    lines.append("")
    for name, stage in found.stages.items():
        lines.append(
            f"{name:<{width}}  busy {stage.busy:>6.1%}  {stage.items:>6} items  waits for {stage.waits_for}"
        )
    where = f"{found.bottleneck['stage']}"
    if found.bottleneck["device"] is not None:
        where += f" on {found.bottleneck['device']}"
    return "\n".join([*lines, "", f"bottleneck: {where}"]) + "\n"
