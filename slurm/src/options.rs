//! What a user asks for: `--gpu-mem`, `--gpu-share`, `--gpu-class`, `--gpu-evictable`,
//! `--gpu-unaligned`.

use control::kinds::Share;
use control::setting::Kind as _;
use control::{Class, parse_bytes};

/// The options of one job or step; `None`: not given.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Asked {
    /// Memory quota, in bytes.
    pub mem_bytes: Option<u64>,
    /// Part of the device's time.
    pub share: Option<f64>,
    /// How firmly.
    pub class: Option<Class>,
    /// A step over several nodes needs no slices at the same time on each.
    pub unaligned: bool,
    /// Its memory may leave the GPU while it does not run.
    pub evictable: bool,
}

/// Which option it is, for Slurm.
pub const MEM: i32 = 1;
pub const SHARE: i32 = 2;
pub const CLASS: i32 = 3;
pub const UNALIGNED: i32 = 4;
pub const EVICTABLE: i32 = 5;

impl Asked {
    /// Nothing was asked for of a GPU.
    pub fn is_empty(&self) -> bool {
        let nothing = Self {
            unaligned: self.unaligned,
            ..Self::default()
        };
        *self == nothing
    }

    /// Takes an option's value.
    ///
    /// # Errors
    /// What is wrong with it, in one line with the option.
    pub fn take(&mut self, option: i32, text: &str) -> Result<(), String> {
        match option {
            MEM => {
                let bytes = parse_bytes(text);
                self.mem_bytes = Some(bytes.map_err(|error| format!("--gpu-mem: {error}"))?);
            }
            SHARE => {
                let share = Share::parse(text);
                self.share = Some(share.map_err(|error| format!("--gpu-share: {error}"))?);
            }
            CLASS => {
                let class = text.parse::<Class>();
                self.class = Some(class.map_err(|error| format!("--gpu-class: {error}"))?);
            }
            // These have no value.
            UNALIGNED => self.unaligned = true,
            EVICTABLE => self.evictable = true,
            other => return Err(format!("option {other} is none of sublet's")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_everywhere() {
        let mut asked = Asked::default();
        assert!(asked.is_empty());
        asked.take(MEM, "8G").unwrap();
        asked.take(SHARE, "0.25").unwrap();
        asked.take(CLASS, "opportunistic").unwrap();
        let expected = Asked {
            mem_bytes: Some(8 << 30),
            share: Some(0.25),
            class: Some(Class::Opportunistic),
            ..Asked::default()
        };
        assert_eq!(asked, expected);
        asked.take(SHARE, "50%").unwrap();
        assert_eq!(asked.share, Some(0.5));
        let mut only = Asked::default();
        only.take(UNALIGNED, "").unwrap();
        assert!(only.unaligned && only.is_empty(), "it asks for no part");
        let mut only = Asked::default();
        only.take(EVICTABLE, "").unwrap();
        assert!(only.evictable && !only.is_empty(), "of a part that it has");
    }

    #[test]
    fn mistakes_are_refused_with_option_and_value() {
        for (option, text, words) in [
            (MEM, "8", "--gpu-mem: `8`"),
            (MEM, "much", "`much`"),
            (MEM, "0G", "--gpu-mem"),
            (MEM, "-1G", "`-1G`"),
            (SHARE, "0", "--gpu-share: `0`"),
            (SHARE, "1.5", "at most 1"),
            (SHARE, "150%", "`150%`"),
            (SHARE, "NaN", "`NaN`"),
            (SHARE, "", "``"),
            (CLASS, "best", "`best`"),
            (9, "x", "option 9"),
        ] {
            let error = Asked::default().take(option, text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
