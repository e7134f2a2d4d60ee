"""What an engine or a server answered, in one form, and when two answers are the same."""

from __future__ import annotations

from dataclasses import dataclass

# A prompt computed at once is rounded elsewhere in float32 than one with its last token computed on top of a cache.
# Answers from another cache differ by some tenths at least.
LOGPROB_TOLERANCE = 0.002


@dataclass
class Choice:
    """One sequence of an answer: its tokens, the log-probability of each, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish: str | None


@dataclass
class Answer:
    """What came back for one request: its sequences and `kv_transfer_params`."""

    choices: list[Choice]
    params: dict | None = None

    @property
    def tokens(self):
        return self.choices[0].tokens

    @property
    def logprobs(self):
        return self.choices[0].logprobs

    @property
    def finish(self):
        return self.choices[0].finish


def same(one, other, tolerance=LOGPROB_TOLERANCE):
    """Whether both answers have the same tokens with the same log-probabilities, sequence by sequence."""
    return len(one.choices) == len(other.choices) and all(
        a.tokens == b.tokens
        and len(a.logprobs) == len(b.logprobs) == len(a.tokens)
        and all(abs(x - y) <= tolerance for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in zip(one.choices, other.choices, strict=True)
    )
