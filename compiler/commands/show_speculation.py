"""What speculation did, for people: tokens a round, acceptance by depth, where time went, what it gained."""

from rich.console import Group, RenderableType
from rich.text import Text

from octavo.runtime.speculative.speculator import Speculator

BARS = " ▁▂▃▄▅▆▇█"


def speculation(speculator: Speculator, seconds: float) -> RenderableType:
    """Three lines. seconds: that the engine spent in steps."""
    figures, name = speculator.figures, speculator.proposer.name
    if not figures.rounds:
        return Text(f"speculation ({name}): no drafts; nothing to go by, or they would not have paid")
    share = figures.accepted / figures.drafted if figures.drafted else 0.0
    first = (
        f"speculation ({name}): {figures.mean_emitted:.2f} tokens a round ({figures.rounds} rounds), "
        f"{share:.0%} of {figures.drafted} drafted tokens accepted"
    )
    return Group(
        Text(first), Text(f"  {_acceptance(figures.acceptance)}"), Text(f"  {_times(speculator, seconds)}")
    )


def _acceptance(shares: tuple[float, ...]) -> str:
    bars = "".join(BARS[round(share * (len(BARS) - 1))] for share in shares)
    return f"accepted by depth, behind accepted ones: {bars} " + " ".join(f"{share:.0%}" for share in shares)


def _times(speculator: Speculator, seconds: float) -> str:
    figures = speculator.figures
    plain_s = sum(one.seconds for one in figures.plain.values())
    parts = {
        "drafting": figures.draft_s, "target with drafts": figures.target_s, "verifying": figures.verify_s,
        "target without": plain_s,
    }  # fmt: skip
    parts["prompts and other"] = max(seconds - sum(parts.values()), 0.0)
    shown = ", ".join(f"{value / seconds:.0%} {name}" for name, value in parts.items()) if seconds else "none"
    gain = figures.speed_up
    steps = sum(one.steps for one in figures.plain.values())
    told = (
        "speed-up unknown, as no step ran without drafts"
        if gain is None
        else (f"steps with drafts {gain:.2f}x as fast as the {steps} without")
    )
    return f"time: {shown}; {told}"
