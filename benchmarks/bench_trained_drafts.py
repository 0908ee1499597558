"""Small targets and what drafts for them, trained together on text that comes with Octavo; then speed and law.

    python benchmarks/bench_trained_drafts.py --minutes 4

Two pairs: a small DeepSeek-V3 (latent attention, experts) with its MTP module; a Llama with a one-layer draft model.
Bytes are tokens. Each answers greedily pieces of the text with and without drafts, interleaved: ratios of seconds
behind the first token, with their spread, and tokens that differ. Then two tokens are sampled behind one prompt many
times with drafts and without, and both counts are compared by a chi-square test.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy.stats import chi2_contingency
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from octavo.compiler import api
from octavo.compiler.artifact import Artifact
from octavo.compiler.compiled import load
from octavo.compiler.drafts.mtp import MtpHead
from octavo.compiler.measure_steps import add_step_times, measure_steps
from octavo.compiler.progress import Report, progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.figures import Figures
from octavo.runtime.speculative.options import Speculate

TEXT = Path(__file__).parent / "text" / "python_reference.txt"
CHARACTERS, WINDOW, BATCH = 12_000, 96, 8
PROMPTS, PROMPT_LENGTH, ANSWER = 8, 48, 128
DEPTHS = 3  # steps that the MTP module is trained to make on its own states


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="of training for each pair (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--draws", type=int, default=4000, help="of two tokens, with and without (default: 4000)"
    )
    options = parser.parse_args()
    text = (
        torch.frombuffer(bytearray(TEXT.read_bytes()[:CHARACTERS]), dtype=torch.uint8).long().clamp(max=127)
    )
    table = plain_table(
        "pair", "loss", "times plain", "spread", "tokens a round", "accepted by depth", "differ", "p of the law",
        left=("pair", "accepted by depth"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, progress_bars() as bars:
        for name, make in (
            ("DeepSeek-V3 with MTP", deepseek_with_mtp),
            ("Llama with a draft model", llama_pair),
        ):
            target, draft, loss = make(text, options.minutes, bars(f"train {name}"))
            paths = build(Path(folder) / name, target, draft, bars("step times"))
            ratios, figures, differing = speed(paths, text, options.rounds)
            p = law(paths, text, options.draws, bars("law"))
            by_depth = " ".join(f"{share:.2f}" for share in figures.acceptance[:6])
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            table.add_row(
                name, f"{loss:.3f}", f"{statistics.median(ratios):.2f}", spread, f"{figures.mean_emitted:.2f}",
                by_depth, str(differing), f"{p:.3f}",
            )  # fmt: skip
    Console(highlight=False).print(
        titled(f"{CHARACTERS} bytes of text, {options.minutes} minutes of training", table)
    )


def deepseek_with_mtp(text: Tensor, minutes: float, progress: Report) -> tuple[nn.Module, nn.Module, float]:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=256, intermediate_size=768, moe_intermediate_size=256, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=8, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=512, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = DeepseekV3ForCausalLM(config)
    head = MtpHead.for_target(model).train()
    positions = torch.arange(WINDOW)[None]

    def loss(ids: Tensor) -> Tensor:
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        total = _next_token(output.logits, ids)
        features = output.hidden_states[-1].detach()
        for depth in range(DEPTHS):
            before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], 1)
            logits, features = head(ids, positions, before)
            total = total + 0.3 * _next_token(logits[:, depth:], ids[:, depth:])
        return total

    parameters = {id(p): p for module in (model, head) for p in module.parameters()}
    final = train(list(parameters.values()), loss, text, minutes, progress)
    return model.eval(), head.eval(), final


def llama_pair(text: Tensor, minutes: float, progress: Report) -> tuple[nn.Module, nn.Module, float]:
    torch.manual_seed(0)

    def llama(width: int, layers: int) -> Any:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None,
            )
        )  # fmt: skip

    target, draft = llama(256, 10), llama(256, 1)
    parameters = [*target.parameters(), *draft.parameters()]

    def loss(ids: Tensor) -> Tensor:
        logits = [model(input_ids=ids, use_cache=False).logits for model in (target, draft)]
        return _next_token(logits[0], ids) + _next_token(logits[1], ids)

    return target.eval(), draft.eval(), train(parameters, loss, text, minutes, progress)


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    parameters: Sequence[nn.Parameter], loss_of: Callable[[Tensor], Tensor], text: Tensor, minutes: float,
    progress: Report,
) -> float:  # fmt: skip
    """AdamW on random windows, for so long; returns the last steps' mean loss."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    generator, began = torch.Generator().manual_seed(0), time.monotonic()
    losses: list[float] = []
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        progress("of the time", int(100 * share), 100)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (len(losses) + 1) / 30) * max(0.02, 1 - share)
        starts = torch.randint(0, len(text) - WINDOW, (BATCH,), generator=generator)
        loss = loss_of(torch.stack([text[start : start + WINDOW] for start in starts.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return statistics.fmean(losses[-10:])


def build(folder: Path, target: nn.Module, draft: nn.Module, progress: Report) -> tuple[Artifact, Path]:
    features = getattr(draft, "target_features", None)
    compiled = api.compile(target, output=folder / "target", features=features, verify="off", progress=False)
    add_step_times(compiled.artifact, measure_steps(compiled.artifact, progress))
    api.compile(draft, output=folder / "draft", verify="off", progress=False)
    return load(folder / "target").artifact, folder / "draft"


def speed(paths: tuple[Artifact, Path], text: Tensor, rounds: int) -> tuple[list[float], Figures, int]:
    """Ratios of each round and prompt, what drafts brought, tokens that differ."""
    target, draft = paths
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    plain = Engine.from_artifact(target, use_tokenizer=False, prefix_caching=False)
    drafted = Engine.from_artifact(
        target, use_tokenizer=False, prefix_caching=False, speculate=Speculate("draft", draft)
    )
    ratios, differing = [], 0
    for turn in range(rounds + 1):
        for start in range(0, CHARACTERS - PROMPT_LENGTH, CHARACTERS // PROMPTS):
            prompt = text[start : start + PROMPT_LENGTH].tolist()
            (plain_s, wanted), (own_s, got) = (_timed(engine, prompt, params) for engine in (plain, drafted))
            differing += sum(a != b for a, b in zip(wanted, got, strict=True))
            if turn:  # the first round warms up
                ratios.append(plain_s / own_s)
    assert drafted.speculator is not None
    return ratios, drafted.speculator.figures, differing


def _timed(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    tokens, began = [], 0.0
    for token in engine.stream([prompt], params):
        began = began or time.perf_counter()
        assert token.token_id is not None
        tokens.append(token.token_id)
    return time.perf_counter() - began, tokens


def law(paths: tuple[Artifact, Path], text: Tensor, draws: int, progress: Report) -> float:
    """The p-value of equal laws: second and third token behind a prompt, sampled with drafts and without."""
    target, draft = paths
    params = SamplingParams(max_tokens=3, temperature=1.5, ignore_eos=True)
    counts = []
    for number, method in enumerate((None, Speculate("draft", draft, length=2))):
        progress("draws", number, 2)
        engine = Engine.from_artifact(target, use_tokenizer=False, speculate=method, seed=7 + number)
        prompt = text[100 : 100 + PROMPT_LENGTH].tolist()
        answers = engine.generate([prompt] * draws, params)
        counts.append(Counter(answer.token_ids[1:] for answer in answers))
    common = [pair for pair, count in (counts[0] + counts[1]).items() if count >= 20]
    rows = [[own[pair] for pair in common] + [draws - sum(own[pair] for pair in common)] for own in counts]
    result: Any = chi2_contingency(rows)
    return float(result.pvalue)


if __name__ == "__main__":
    main()
