"""ARTIFACT DISPATCHER (or -), under torchrun: serve, count loads, move every expert, serve again. Prints JSON."""

import json
import sys

from octavo.compiler.compiled import load
from octavo.compiler.expert_placement import ExpertPlacement, contiguous_placement
from octavo.runtime.sampling_params import SamplingParams

PROMPTS = [[5, 9, 2, 77, 31], [3, 8, 11], [40], [1, 2, 3, 4, 5, 6, 7, 8, 9], [99, 98]]
NUM_TOKENS = 8


def main() -> None:
    compiled = load(sys.argv[1])
    engine = compiled.distributed_engine(dispatcher=None if sys.argv[2] == "-" else sys.argv[2])
    if engine.rank != 0:
        engine.serve()
        return
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.count_experts()
    first = engine.generate(PROMPTS, params)
    loads = engine.expert_loads()
    program = compiled.artifact.program
    held = contiguous_placement(loads.shape[1], program.mesh.world).experts
    turned = ExpertPlacement((*held[1:], held[0]))
    engine.place_experts([turned] * len(loads))
    second = engine.generate(PROMPTS, params)
    engine.close()
    answers = [[answer.token_ids for answer in part] for part in (first, second)]
    print(json.dumps({"answers": answers, "loads": loads.tolist()}))


if __name__ == "__main__":
    main()
