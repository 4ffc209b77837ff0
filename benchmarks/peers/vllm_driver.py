"""Drives vLLM's engine on the CPU in its own environment: `… FOLDER bfloat16|float32 [eager]`.

Without its server and its second process: one call of `step` is one step, so that rows compare
engines. Its prefix cache is on, as it is by default.
"""

from __future__ import annotations

import itertools
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.peers.conversations import Conversations
from benchmarks.peers.driver import Driven, serve, timed

CONTEXT_TOKENS = 4096
BATCH_TOKENS = 2048
SEQUENCES = 32
ENDLESS = 1024


class Vllm:
    def __init__(self, folder: str, dtype: str, *, eager: bool) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                dtype=dtype,
                skip_tokenizer_init=True,
                max_model_len=CONTEXT_TOKENS,
                max_num_batched_tokens=BATCH_TOKENS,
                max_num_seqs=SEQUENCES,
                enforce_eager=eager,
                disable_log_stats=True,
            )
        )
        self._about = f"{dtype}, {'eager' if eager else 'compiled'}"
        self._numbers = itertools.count()
        self._decoding: list[str] = []
        self._kept: list[int] = []

    def about(self) -> str:
        return self._about

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        name = str(next(self._numbers))
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        return name

    def _until_finished(self, prompt: list[int], max_tokens: int) -> list[int]:
        self._add(prompt, max_tokens)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
        return tokens

    def first_token(self, prompt: list[int]) -> float:
        self._kept = prompt
        return self.warm_first_token()

    def warm_first_token(self) -> float:
        return timed(lambda: self._until_finished(self._kept, 1))

    def start_decoding(self, prompts: list[list[int]]) -> None:
        self._decoding = [self._add(prompt, ENDLESS) for prompt in prompts]
        waiting = set(self._decoding)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}

    def steps(self, count: int) -> list[float]:
        return [timed(self._step) for _ in range(count)]

    def _step(self) -> None:
        made = len(self._engine.step())
        assert made == len(self._decoding), f"{made} of {len(self._decoding)} sequences stepped"

    def stop_decoding(self) -> None:
        self._engine.abort_request(self._decoding)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def agents(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> float:
        return timed(lambda: self._converse(Conversations(shared, texts, answer_tokens)))

    def _converse(self, conversations: Conversations) -> None:
        length = conversations.answer_tokens
        talking = {
            self._add(prompt, length): index
            for index, prompt in enumerate(conversations.openings())
        }
        while talking:
            for output in self._engine.step():
                if output.finished:
                    index = talking.pop(output.request_id)
                    answer = list(output.outputs[0].token_ids)
                    prompt = conversations.answered(index, answer)
                    if prompt is not None:
                        talking[self._add(prompt, length)] = index

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self._until_finished(prompt, count)


def make() -> Driven:
    return Vllm(sys.argv[1], sys.argv[2], eager=sys.argv[3:] == ["eager"])


if __name__ == "__main__":
    serve(make)
