"""The parts of `fastdp.verify`: records, runs by the engine and by plain torch, random draws, and the verdict."""
