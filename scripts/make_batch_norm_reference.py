"""Writes tests/data/batch_norm_reference.pt and batch_norm_checkpoint.pt.

What one process of Python PyTorch computes for the batches that the tests cut into the shares of
several ranks. Made with torch 2.13.0:  python3 scripts/make_batch_norm_reference.py tests/data
"""

import sys

import torch

FORMS = {
    "nc": (8, 5),
    "ncl": (8, 5, 7),
    "nchw": (8, 5, 4, 3),
    "nhwc": (8, 5, 4, 3),
    "strided": (8, 5, 4, 3),
    "ncdhw": (8, 5, 2, 3, 2),
    "ndhwc": (8, 5, 2, 3, 2),
}
MODULES = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}
TYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
STEPS = 20


def laid_out(x, form):
    if form == "nhwc":
        return x.contiguous(memory_format=torch.channels_last)
    if form == "ndhwc":
        return x.contiguous(memory_format=torch.channels_last_3d)
    if form == "strided":
        return torch.stack((x, x), dim=-1)[..., 1]
    return x


def reference(form, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = FORMS[form]
    state = torch.float64 if dtype == torch.float64 else torch.float32
    bn = MODULES[len(sizes)](sizes[1], dtype=state)
    optimizer = torch.optim.SGD(bn.parameters(), lr=0.1, momentum=0.9)
    x = laid_out((torch.randn(sizes, generator=generator, dtype=torch.float64) * 2 + 1).to(dtype), form)
    target = torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
    out = {"x": x.contiguous(), "target": target}
    x = x.detach().requires_grad_()
    for step in range(STEPS):
        optimizer.zero_grad()
        x.grad = None
        y = bn(x)
        ((y.to(state) - target.to(state)) ** 2).mean().backward()
        if step == 0:
            out.update(y=y.detach().contiguous(), dx=x.grad.contiguous().clone())
            out.update(dweight=bn.weight.grad.clone(), dbias=bn.bias.grad.clone())
        optimizer.step()
    for name, value in bn.state_dict().items():
        out[name] = value.clone()
    return out


def main(folder):
    torch.set_num_threads(1)
    cases = {}
    for index, form in enumerate(FORMS):
        for name, dtype in TYPES.items():
            for key, value in reference(form, dtype, seed=100 + index).items():
                cases[f"{form}.{name}.{key}"] = value
    torch.save(cases, f"{folder}/batch_norm_reference.pt")

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(),
                              torch.nn.BatchNorm1d(12))
    for _ in range(3):
        net(torch.randn(4, 2, 4, 4))
    net[1].weight.data.normal_()
    net[3].bias.data.normal_()
    # As a dict: torch::pickle_load cannot read the attribute (_metadata) of a state_dict.
    torch.save(dict(net.state_dict()), f"{folder}/batch_norm_checkpoint.pt")


main(sys.argv[1])
