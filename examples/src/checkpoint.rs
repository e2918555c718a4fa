//! The state of a training run in a file that is either whole or refused.
//!
//! The file is the magic, a version, the fields below in little-endian order, and at its end the
//! FNV-1a hash of all before it. It is written beside its place, synced, and renamed into it, so a
//! reader sees the old or the new one, never a part.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

const MAGIC: &[u8; 8] = b"SUBLETCK";
const VERSION: u32 = 1;

/// What a run must have in common with the one that it continues.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Units of the hidden layer.
    pub hidden: u32,
    /// Images per step.
    pub batch: u32,
    /// Adam's step size.
    pub lr: f32,
    /// Seed of the weights and of the order of images.
    pub seed: u64,
}

/// Everything that decides how the run goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// The run's configuration.
    pub config: Config,
    /// Steps done.
    pub step: u64,
    /// Epochs done.
    pub epoch: u64,
    /// Images of the current epoch done.
    pub position: u32,
    /// The generator's state before the current epoch's order was drawn.
    pub order_state: u64,
    /// Losses of the current epoch's steps so far.
    pub losses: Vec<f32>,
    /// All weights.
    pub weights: Vec<f32>,
    /// Adam's first moments.
    pub first_moments: Vec<f32>,
    /// Adam's second moments.
    pub second_moments: Vec<f32>,
}

/// Why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("cannot {doing} the checkpoint {path}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The file is no checkpoint, or a damaged one.
    #[error("the checkpoint {path} is unusable: {what}; remove it to start anew")]
    Unusable {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
}

impl Checkpoint {
    /// Replaces the file at `path` by this checkpoint.
    ///
    /// # Errors
    /// When the file system refuses; the file at `path` is then the old one.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let fail = |doing| {
            move |source| Error::Io {
                doing,
                path: path.display().to_string(),
                source,
            }
        };
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        let written = File::create(&temporary)
            .and_then(|mut file| {
                file.write_all(&self.encode())
                    .and_then(|()| file.sync_all())
            })
            .and_then(|()| std::fs::rename(&temporary, path));
        if written.is_err() {
            // The error that matters is the first one; a file that was never created cannot be
            // removed.
            let _ = std::fs::remove_file(&temporary);
        }
        written.map_err(fail("write"))?;
        // The rename itself survives a crash only when the folder is synced.
        let folder = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))
            .and_then(|folder| folder.sync_all())
            .map_err(fail("sync"))
    }

    /// The checkpoint at `path`, or `None` when there is no such file.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a whole checkpoint of this version.
    pub fn read(path: &Path) -> Result<Option<Checkpoint>, Error> {
        let shown = path.display().to_string();
        match std::fs::read(path) {
            Ok(bytes) => match Checkpoint::decode(&bytes) {
                Ok(checkpoint) => Ok(Some(checkpoint)),
                Err(what) => Err(Error::Unusable { path: shown, what }),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io {
                doing: "read",
                path: shown,
                source,
            }),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.config.hidden.to_le_bytes());
        out.extend(self.config.batch.to_le_bytes());
        out.extend(self.config.lr.to_le_bytes());
        out.extend(self.config.seed.to_le_bytes());
        out.extend(self.step.to_le_bytes());
        out.extend(self.epoch.to_le_bytes());
        out.extend(self.position.to_le_bytes());
        out.extend(self.order_state.to_le_bytes());
        for values in [
            &self.losses,
            &self.weights,
            &self.first_moments,
            &self.second_moments,
        ] {
            out.extend((values.len() as u64).to_le_bytes()); // CAST: a length fits 64 bits.
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        out.extend(fnv1a(&out).to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<Checkpoint, String> {
        let short = || format!("it ends after {} bytes", bytes.len());
        let mut all = Reader { rest: bytes };
        if all.take(MAGIC.len()) != Some(MAGIC) {
            return Err("it is no checkpoint of this program".to_owned());
        }
        let version = all.u32().ok_or_else(short)?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, this program reads version {VERSION}"
            ));
        }
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(short)?;
        if fnv1a(body) != u64::from_le_bytes(*sum) {
            return Err("its content does not match its checksum".to_owned());
        }
        // PANIC: the magic and the version were read above and the checksum comes after them, or it
        // did not match.
        let mut fields = Reader {
            rest: body.get(MAGIC.len() + 4..).ok_or_else(short)?,
        };
        let mut read = || -> Option<Checkpoint> {
            Some(Checkpoint {
                config: Config {
                    hidden: fields.u32()?,
                    batch: fields.u32()?,
                    lr: f32::from_bits(fields.u32()?),
                    seed: fields.u64()?,
                },
                step: fields.u64()?,
                epoch: fields.u64()?,
                position: fields.u32()?,
                order_state: fields.u64()?,
                losses: fields.floats()?,
                weights: fields.floats()?,
                first_moments: fields.floats()?,
                second_moments: fields.floats()?,
            })
        };
        let checkpoint = read().ok_or_else(short)?;
        if fields.rest.is_empty() {
            Ok(checkpoint)
        } else {
            Err(format!("{} bytes too many", fields.rest.len()))
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn floats(&mut self) -> Option<Vec<f32>> {
        let count = usize::try_from(self.u64()?).ok()?;
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(
            bytes
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
        )
    }
}

/// FNV-1a in 64 bits (Fowler, Noll, Vo): against damage, not against malice.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Checkpoint {
        Checkpoint {
            config: Config {
                hidden: 128,
                batch: 64,
                lr: 0.002,
                seed: u64::MAX,
            },
            step: 1 << 40,
            epoch: 7,
            position: 128,
            order_state: 0xDEAD_BEEF_0123_4567,
            losses: vec![0.5, f32::MIN_POSITIVE],
            weights: vec![1.0, -0.0, 3.5e-39, f32::MAX],
            first_moments: vec![-1.0; 4],
            second_moments: vec![],
        }
    }

    #[test]
    fn a_round_trip_keeps_every_bit_and_leaves_one_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("run.ckpt");
        assert!(
            Checkpoint::read(&path)
                .expect("a missing file is no error")
                .is_none()
        );
        let mut checkpoint = sample();
        checkpoint.write(&path).expect("the folder is writable");
        checkpoint.step += 1;
        checkpoint
            .write(&path)
            .expect("an old checkpoint is replaced");
        let read = Checkpoint::read(&path)
            .expect("the file is whole")
            .expect("the file is there");
        assert_eq!(read, checkpoint);
        assert_eq!(read.encode(), checkpoint.encode());
        assert_eq!(
            std::fs::read_dir(folder.path())
                .expect("the folder is readable")
                .count(),
            1
        );
    }

    #[test]
    fn damage_of_any_byte_is_refused() {
        let good = sample().encode();
        assert_eq!(Checkpoint::decode(&good), Ok(sample()));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Checkpoint::decode(&bad).is_err(), "byte {at}");
            assert!(Checkpoint::decode(&good[..at]).is_err(), "cut to {at}");
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(Checkpoint::decode(&longer).is_err());
    }

    #[test]
    fn lengths_that_lie_are_refused_even_with_a_matching_checksum() {
        let mut checkpoint = sample();
        checkpoint.losses.clear();
        let mut bytes = checkpoint.encode();
        bytes.truncate(bytes.len() - 8);
        let first_length = 8 + 4 + 4 + 4 + 4 + 8 + 8 + 8 + 4 + 8;
        assert_eq!(bytes[first_length..first_length + 8], [0; 8]);
        for lie in [1u64 << 62, u64::MAX, 1000] {
            let mut bad = bytes.clone();
            bad[first_length..first_length + 8].copy_from_slice(&lie.to_le_bytes());
            bad.extend(fnv1a(&bad).to_le_bytes());
            assert!(Checkpoint::decode(&bad).is_err(), "{lie}");
        }
    }

    #[test]
    fn a_refusal_names_the_file_and_the_remedy() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "not a checkpoint").expect("the folder is writable");
        let message = Checkpoint::read(&path)
            .expect_err("that is no checkpoint")
            .to_string();
        assert!(
            message.contains("notes.txt") && message.contains("remove it"),
            "{message}"
        );
        let missing = folder.path().join("no-such-folder").join("run.ckpt");
        assert!(sample().write(&missing).is_err());
    }
}
