"""Tiny LLaVAs with their processor, and rows of texts with images."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from model_types import DECODER, IMAGE
from tiny_images import picture
from tiny_models import scatter
from tiny_texts import WORDS, word_tokenizer
from torch import nn

CHAT = (
    "{% for m in messages %}{{ m.role[0] }} {% for part in m.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
IMAGE_WORDS = (*WORDS, "<image>", *"uvwxyz")


def llava_model(seed: int = 0) -> nn.Module:
    """A tower of two blocks for images of 8 x 8 pixels, and a decoder of two blocks."""
    torch.manual_seed(seed)
    words: Any = {"vocab_size": len(IMAGE_WORDS), "pad_token_id": 0, "eos_token_id": 1}
    decoder: Any = DECODER | words | {"max_position_embeddings": 64}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**IMAGE),
        text_config=hf.LlamaConfig(**decoder),
        image_token_index=IMAGE_WORDS.index("<image>"),
        vision_feature_layer=-1,
    )
    return scatter(hf.LlavaForConditionalGeneration(config).eval(), seed, 0.05)


def llava_processor() -> Any:
    """Four tokens for each image, without the class token."""
    tokenizer = word_tokenizer(words=IMAGE_WORDS, additional_special_tokens=["<image>"])
    sizes: Any = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(**sizes), tokenizer, patch_size=4, chat_template=CHAT,
        vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def image_rows(folder: Path, task: int, number: int = 30) -> list[dict[str, Any]]:
    """Prompts on images, stored in a folder. The second task has chats, of which some have none."""
    letters, rows = WORDS[3:], list[dict[str, Any]]()
    for n in range(number):
        name = f"{task}-{n}.png"
        picture(100 * task + n, (12, 12)).save(folder / name)
        words = [letters[(7 * task + n * k) % 20] for k in range(1, 3 + n % 4)]
        row: Any = {"prompt": " ".join(words), "target": letters[(7 * task + n) % 20]}
        if task == 0:
            rows.append(row | {"image": name})
            continue
        parts = [{"type": "text", "text": row["prompt"]}]
        parts += [{"type": "image", "path": name}] if n % 3 else []
        turns = [{"role": "user", "content": parts}]
        rows.append({"messages": [*turns, {"role": "assistant", "content": row["target"]}]})
    return rows
