"""A short vLLM program: a small Llama of dummy weights answers a few prompts, greedily, on two devices where there are two.

    vllm_job.py FOLDER [MEMORY_PART]

FOLDER is where the model's configuration goes; nothing is fetched. Prints one JSON object. Run bare and governed, `result` must be the same.
"""

import hashlib
import json
import os
import pathlib
import sys

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"})

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main(folder, part):
    import torch
    import vllm

    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    devices = min(2, torch.cuda.device_count())
    free, total = torch.cuda.mem_get_info()
    model = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=devices,
        gpu_memory_utilization=part,
        num_gpu_blocks_override=256,
        max_model_len=256,
        seed=5,
    )
    prompts = [{"prompt_token_ids": [(7 * at + step) % 2000 + 3 for step in range(16)]} for at in range(8)]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in model.generate(prompts, sampling)]
    print(json.dumps({"version": vllm.__version__, "devices": devices, "answers": len(tokens), "free_bytes": free, "total_bytes": total,
                      "result": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()}))


# Its workers import this file anew.
if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.5)
