"""Model building blocks in plain torch: the CPU path, and the oracle of every faster one."""
