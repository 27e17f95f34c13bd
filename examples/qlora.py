"""QLoRA with differential privacy: a 4-bit base of bitsandbytes, LoRA on top, on a GPU or the CPU.

    pip install '.[hf]' bitsandbytes
    python examples/qlora.py [--model NAME_OR_FOLDER] [--steps 20]

Without --model, a tiny random Llama is made; texts are random tokens. docs/adapters.md says what to look out for.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import fastdp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SystemExit("4-bit weights need bitsandbytes: pip install bitsandbytes")
    on_gpu = torch.cuda.is_available()
    if not options.model:
        options.model = tempfile.mkdtemp()
        LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4)).save_pretrained(options.model)  # fmt: skip
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                bnb_4bit_compute_dtype=torch.bfloat16 if on_gpu else torch.float32)  # fmt: skip
    where = {"": 0 if on_gpu else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config, device_map=where)
    for module in model.modules():  # else an evaluation on the CPU packs the base, and no gradient passes it any more
        module.support_avx512bf16_for_cpu = False
    kind = {"use_reentrant": False}
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=kind)  # it would freeze an adapter
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        ids = batch[0].to(model.device)
        return fastdp.losses.causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)

    data = torch.utils.data.TensorDataset(torch.randint(0, model.config.vocab_size, (1000, 32)))
    print(fastdp.verify(model, loss, data[:4]))
    loader = fastdp.poisson_loader(data, expected_batch_size=64, max_physical_batch_size=16, steps=options.steps)
    optimizer = fastdp.DPAdamW(model, lr=1e-3, target_epsilon=8, steps=options.steps, loader=loader)
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epsilon {optimizer.epsilon():.2f}")


if __name__ == "__main__":
    main()
