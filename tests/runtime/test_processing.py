"""What is done to logits, through the whole engine: batches, preemption and forks, against a loop over one prompt."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.compiler.errors import RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams, Structured
from octavo.runtime.tokenizer import FileTokenizer

Make = Callable[..., Engine]
LogitsOf = Callable[[Sequence[int]], NDArray[np.float32]]

VOCAB_SIZE = 50
END = 49
PROMPTS = [
    [7, 2, 3],
    [7],
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    [23, 24, 23, 24, 23],
    [7, 2, 3],
]
EACH = [
    SamplingParams(max_tokens=14, repetition_penalty=1.8),
    SamplingParams(max_tokens=14, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(
        max_tokens=14, min_tokens=9, stop_token_ids=tuple(range(0, 40, 2)), logit_bias={4: 3, 7: -100}
    ),
    SamplingParams(
        max_tokens=14, repetition_penalty=0.7, presence_penalty=2.0, min_tokens=3, logit_bias={END: 8}
    ),
    SamplingParams(max_tokens=14),
]


@pytest.fixture(scope="module")
def logits_after(make_engine: Make) -> LogitsOf:
    """The fake model alone: tokens -> logits (vocab,)."""
    runner: Any = make_engine().runner
    logits_of: LogitsOf = runner._logits
    return logits_of


def expected(prompt: list[int], params: SamplingParams, logits_of: LogitsOf) -> list[int]:
    """Greedy decoding by the rules, a token at a time, every logit on its own."""
    answer: list[int] = []
    ends = {END, *params.stop_token_ids}
    while len(answer) < (params.max_tokens or 0):
        scores = []
        for token, logit in enumerate(logits_of(prompt + answer).tolist()):
            score = logit + dict(params.logit_bias).get(token, 0.0)
            if token in prompt + answer:
                score = score * params.repetition_penalty if score < 0 else score / params.repetition_penalty
            score -= params.frequency_penalty * answer.count(token)
            score -= params.presence_penalty * (token in answer)
            scores.append(-np.inf if token in ends and len(answer) < params.min_tokens else score)
        answer.append(int(np.argmax(scores)))
        if answer[-1] in ends:
            break
    return answer


@pytest.mark.parametrize("num_pages", [7, 60])
@pytest.mark.parametrize("max_batch_tokens", [6, 16])
def test_processing_is_each_request_s_own(
    make_engine: Make, logits_after: LogitsOf, num_pages: int, max_batch_tokens: int
) -> None:
    engine = make_engine(num_pages * 2 + 1, 4, eos_token_ids=(END,), max_batch_tokens=max_batch_tokens)
    completions = engine.generate(PROMPTS, EACH)
    answers = [list(completion.token_ids) for completion in completions]
    assert answers == [expected(p, own, logits_after) for p, own in zip(PROMPTS, EACH, strict=True)]
    plain = [expected(prompt, SamplingParams(max_tokens=14), logits_after) for prompt in PROMPTS]
    assert [answer == other for answer, other in zip(answers, plain, strict=True)] == [False] * 4 + [True]


def test_logprobs_are_reported_of_prompt_and_answer(make_engine: Make, logits_after: LogitsOf) -> None:
    params = SamplingParams(
        max_tokens=5, temperature=2.0, repetition_penalty=3.0, logprobs=2, prompt_logprobs=1
    )
    [completion] = make_engine(max_batch_tokens=6).generate([PROMPTS[2]], params)
    tokens = [*completion.prompt_token_ids, *completion.token_ids]
    reported = [*(completion.prompt_logprobs or ()), *(completion.answers[0].logprobs or ())]
    assert len(reported) == len(tokens) - 1
    for at, each in enumerate(reported, 1):
        logprobs = log_softmax(logits_after(tokens[:at]).astype(np.float64))
        best = np.argsort(-logprobs)[: 1 if at < len(PROMPTS[2]) else 2].tolist()
        assert each.token_id == tokens[at] and each.logprob == pytest.approx(logprobs[tokens[at]], rel=1e-9)
        assert [token for token, _ in each.top_logprobs] == best
        assert [value for _, value in each.top_logprobs] == pytest.approx(logprobs[best].tolist(), rel=1e-9)


@pytest.fixture(scope="module")
def letters() -> FileTokenizer:
    """Token i is a character, END the end."""
    names = "abcdefghijklmnopqrstuvwxyz0123456789!#$%&()*+,-./"
    library = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return FileTokenizer(str(library.to_str()))


@pytest.mark.parametrize("num_pages", [30, 80])
def test_every_answer_keeps_to_its_own_grammar(
    make_engine: Make, letters: FileTokenizer, num_pages: int
) -> None:
    engine = make_engine(num_pages, 2, letters, eos_token_ids=(END,))
    patterns = [r"[ab]{3,9}", r"(no|yes){1,4}", r"[0-9]{2}-[0-9]{2}(-x)?"]
    params = [
        SamplingParams(max_tokens=16, temperature=3.0, n=3, seed=seed, structured=Structured.regex(pattern))
        for seed, pattern in enumerate(patterns)
    ]
    completions = engine.generate(["ab", "yes", "12"], params)
    assert (engine.stats.num_preemptions > 0) == (num_pages == 30)
    for pattern, completion in zip(patterns, completions, strict=True):
        texts = [answer.text or "" for answer in completion.answers]
        assert len(set(texts)) > 1
        assert [text for text in texts if not re.fullmatch(pattern, text)] == []
        assert {answer.finish_reason for answer in completion.answers} == {"stop"}


def test_beams_keep_to_a_grammar(make_engine: Make, letters: FileTokenizer) -> None:
    engine = make_engine(tokenizer=letters, eos_token_ids=(END,))
    params = SamplingParams(max_tokens=12, beam_width=3, n=3, structured=Structured.regex("a[bc]{2}d?"))
    [completion] = engine.generate(["x"], params)
    texts = {answer.text or "" for answer in completion.answers}
    assert len(texts) == 3 and all(re.fullmatch("a[bc]{2}d?", text) for text in texts)


def test_structure_is_refused_before_anything_runs(make_engine: Make, letters: FileTokenizer) -> None:
    params = SamplingParams(structured=Structured.regex("(a"))
    engine = make_engine(tokenizer=letters, eos_token_ids=(END,))
    with pytest.raises(RequestError, match=r"structured: expected a regex that compiles, got"):
        engine.generate("a", params)
    with pytest.raises(RequestError, match=r"structured: expected an engine with a tokenizer\.json"):
        make_engine(eos_token_ids=(END,)).generate([[1]], params)
    assert not engine.has_unfinished
