"""Ways to libraries that people already use: each in the classes that the library asks for.

    stable_baselines3.py  replay buffers of Stable-Baselines3 (extra sb3)
    hf_datasets.py        datasets of Hugging Face (extra datasets)
    grain_source.py       a data source of grain

Each module is imported when one of its names is used.
Not here: files that other libraries read (formats/), TorchRL's storage (buffers/torchrl_storage.py).
"""
