//! What was measured before: of kinds of job by themselves, and of pairs of them, as policies take
//! it.

use std::collections::BTreeMap;

use policy::cluster::{GpuType, JobType, Past, Profile};

use super::Names;
use super::claims::counting;
use crate::live::records::{Metered, PairRecord, Solo, solo_key};

/// Measured pairs, by type of GPU, number of GPUs and both kinds.
pub(super) type Pairs = BTreeMap<(String, u32, [String; 2]), PairRecord>;
/// What was measured of kinds by themselves, by [`solo_key`].
pub(super) type Solos = BTreeMap<String, Solo>;

/// A profile with what was metered of its kind.
pub(super) fn as_metered(mut profile: Profile, metered: &Metered) -> Profile {
    (profile.busy, profile.mem_busy) = (metered.busy, metered.mem_busy);
    // A quota is what it may come to.
    if profile.persistent_bytes == 0 {
        (profile.persistent_bytes, profile.ephemeral_bytes) =
            (metered.persistent_bytes, metered.ephemeral_bytes);
    }
    profile.iteration_s = metered.iteration_s;
    profile.sane()
}

/// Measured pairs, as a packer takes them. `types`: the types of GPU of that name, of which there
/// are several where devices of one name have several sizes.
pub(super) fn past<T: IntoIterator<Item = GpuType>>(
    pairs: &Pairs,
    solos: &Solos,
    kinds: &mut Names,
    mut types: impl FnMut(&str) -> T,
) -> Vec<Past> {
    let mut all = Vec::new();
    for pair in counting(pairs) {
        for gpu in types(&pair.gpu) {
            let mut profile = |kind: &str| {
                let number = JobType(kinds.number(kind));
                let unknown = Profile::unknown(number, pair.gpus, policy::Class::Guaranteed);
                let seen = solos.get(&solo_key(&pair.gpu, pair.gpus, kind));
                let metered = seen.and_then(|solo| solo.metered);
                metered.map_or(unknown, |metered| as_metered(unknown, &metered))
            };
            let both = (profile(&pair.kinds[0]), profile(&pair.kinds[1]));
            all.push((gpu, both.0, both.1, pair.rates));
        }
    }
    all
}
