"""What does training Surgery on features computed once save over computing them at every update?

    python benchmarks/surgery_features_once.py [--steps 300]

Both sides start from the same module, take the same batches and the same processed pictures, on one
task of the bundled suite. The merged model is the suite's base: its features cost the same.
"""

import argparse
import platform
import time

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import torch
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal.data.pictures import to_pixels
from fusion_bench_featcal.methods import Surgery, SurgeryModule
from fusion_bench_featcal.methods.projection import ProjectedFeatures
from fusion_bench_featcal.methods.training import (
    initial_surgery,
    shuffled_batches,
    task_generator,
)
from fusion_bench_featcal.suites import image

TASK = "mini_mnist"
SAMPLES = 256


def pictures() -> torch.Tensor:
    """Processed test pictures `[samples, channels, height, width]`."""
    items, processor = image.load_split(TASK, "test"), image.load_processor()
    found = [items[index]["image"] for index in range(SAMPLES)]
    return torch.stack([to_pixels(picture, processor, TASK, None) for picture in found])


def main() -> None:
    """Print seconds of both ways and how far their modules are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    method = Surgery(steps=parser.parse_args().steps)
    base, expert = (
        CLIPVisionModel.from_pretrained(place).eval() for place in (image.path(), image.path(TASK))
    )
    projection = CLIPModel.from_pretrained(image.path()).visual_projection.requires_grad_(False)
    pixels, site = pictures(), ProjectedFeatures(projection)

    def features(model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        parts = chosen.split(method.batch_size)
        return torch.cat([method.features(model, site, {"pixel_values": part}) for part in parts])

    def at_every_update() -> SurgeryModule:
        weights = task_generator(method.seed, TASK, "weights")
        module = initial_surgery(projection.out_features, method.rank, weights)
        optimizer = torch.optim.Adam(module.parameters(), lr=method.learning_rate)
        generator = task_generator(method.seed, TASK, "batches")
        for rows in shuffled_batches(SAMPLES, method.batch_size, method.steps, generator):
            corrected = module(features(base, pixels[rows]))
            optimizer.zero_grad()
            (corrected - features(expert, pixels[rows])).abs().mean().backward()
            optimizer.step()
        return module

    def once() -> SurgeryModule:
        return method.fit(features(base, pixels), features(expert, pixels), TASK)

    modules, seconds = [], []
    for train in (at_every_update, once):
        start = time.perf_counter()
        modules.append(train())
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        sides = [module(features(base, pixels)) for module in modules]
    apart = (sides[0] - sides[1]).abs().max() / sides[0].abs().max()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    print("| updates | at every update, s | once, s | largest relative difference |")
    print("|--:|--:|--:|--:|")
    print(f"| {method.steps} | {seconds[0]:.1f} | {seconds[1]:.2f} | {apart:.1e} |")


if __name__ == "__main__":
    main()
