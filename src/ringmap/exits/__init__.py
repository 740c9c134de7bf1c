"""Ways to libraries that people already use: each in the classes that the library asks for.

    sb3.py      replay buffers of Stable-Baselines3

Each module needs the extra that it names, and is imported when one of its names is used.
Not here: files that other libraries read (formats/), TorchRL's storage (buffers/torchrl_storage.py).
"""
