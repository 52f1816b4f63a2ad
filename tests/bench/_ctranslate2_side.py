"""CTranslate2 as a peer of `encoders.py`: run by a Python that has it, it answers a line of JSON for each line.

A line asks for a batch: {"prompts": [[token, …], …], "tokens": n}, or of sounds {"features": .npy file, "tokens": n}.
"""

import json
import sys
import time
from typing import Any

import ctranslate2
import numpy as np


def main() -> None:
    folder, kind, compute_type, start = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    how: dict[str, Any] = {"device": "cpu", "compute_type": compute_type, "inter_threads": 1, "intra_threads": 2}
    is_speech = kind == "whisper-base"
    model = (ctranslate2.models.Whisper if is_speech else ctranslate2.Translator)(folder, **how)
    print(json.dumps({"compute_type": model.compute_type}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        count = asked["tokens"]
        began = time.perf_counter()
        if is_speech:
            features = ctranslate2.StorageView.from_array(np.load(asked["features"]))
            most = max(2 * count, len(start) + 1)  # of which it writes half
            found = model.generate(
                features, [start] * features.shape[0], beam_size=1, max_length=most, suppress_tokens=[]
            )
            lengths = [len(each.sequences_ids[0]) for each in found]
        else:
            found = model.translate_batch(
                asked["prompts"], beam_size=1, max_decoding_length=count, min_decoding_length=count
            )
            lengths = [len(each.hypotheses[0]) for each in found]
        print(json.dumps({"seconds": time.perf_counter() - began, "lengths": lengths}), flush=True)


main()
