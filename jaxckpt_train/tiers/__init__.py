"""The fast tier: directories of the hosts, with copies or parity on other hosts."""
