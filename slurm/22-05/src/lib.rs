//! The plugin for Slurm 22.05, which loads no plugin of another major or minor version.

slurm::plugin!(0x16_05_00);
