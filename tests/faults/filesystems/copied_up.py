"""A ring in the lower layer of overlayfs, which a reader holds open when a writer opens it: prints what the reader
says."""

import os
import subprocess
import sys
import time

import numpy as np

import ringmap
from ringmap.errors import ReplacedError
from ringmap.storage.read.reader import HELD_S


def main(folder, late):
    os.chdir(folder)
    for name in ("low", "up", "work", "over"):
        os.mkdir(name)
    with ringmap.ReplayBuffer(100, path="low/ring", seed=0) as buf:
        for number in range(3):
            buf.write_episode({"x": np.full(20, number)})
    buf.close()
    options = "lowerdir=low,upperdir=up,workdir=work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "none", "over"], check=True)
    if late:
        writer, reader = (
            ringmap.ReplayBuffer.open("over/ring", "r+"),
            ringmap.ReplayBuffer.open("over/ring"),
        )
    else:
        reader = ringmap.ReplayBuffer.open("over/ring")
        reader.refresh()  # it knows the state that is shown
        time.sleep(2 * HELD_S)
        writer = ringmap.ReplayBuffer.open("over/ring", "r+")
    writer.write_episode({"x": np.full(20, 3)})
    try:
        reader.refresh()
        print(reader.num_episodes, end=" ")
    except ReplacedError as error:
        print(error, end=" ")
    again = ringmap.ReplayBuffer.open("over/ring")
    writer.write_episode({"x": np.full(20, 4)})
    again.refresh()
    print(
        [int(again.load_episode(i)["x"][0]) for i in range(again.num_episodes)],
        ringmap.check("over/ring"),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "late")
