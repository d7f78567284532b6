"""The peer tier: RAM disks of other machines, served by agents and read over HTTP."""
