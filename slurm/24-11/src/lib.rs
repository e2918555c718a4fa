//! The plugin for Slurm 24.11, which loads no plugin of another major or minor version.

slurm::plugin!(0x18_0b_00);
