//! The invariant of partitions over random histories: sum P + max E <= size, and all sizes together
//! fit the device.

use policy::{HOLD_BACK_BYTES, Memory, PartitionTable, TenantId};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// Comes, or says other figures than before.
    Says {
        id: u64,
        persistent_mib: u64,
        ephemeral_mib: u64,
    },
    Goes {
        id: u64,
    },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let says =
        (0u64..12, 0u64..12_000, 0u64..12_000).prop_map(|(id, persistent_mib, ephemeral_mib)| {
            Event::Says {
                id,
                persistent_mib,
                ephemeral_mib,
            }
        });
    let goes = (0u64..12).prop_map(|id| Event::Goes { id });
    proptest::collection::vec(prop_oneof![4 => says, 1 => goes], 1..60)
}

fn check(table: &PartitionTable, device_bytes: u64) -> Result<(), TestCaseError> {
    let mut all_bytes = 0;
    let mut seen = Vec::new();
    for (partition, size_bytes, members) in table.partitions() {
        let persistent: u64 = members.iter().map(|(_, m)| m.persistent_bytes).sum();
        let ephemeral = members.iter().map(|(_, m)| m.ephemeral_bytes).max();
        let needs = persistent + ephemeral.unwrap_or(0);
        prop_assert!(
            needs <= size_bytes,
            "{partition:?} needs {needs} of {size_bytes}"
        );
        prop_assert!(!members.is_empty(), "{partition:?} is empty");
        all_bytes += size_bytes;
        seen.extend(members.iter().map(|(id, _)| *id));
    }
    prop_assert!(
        all_bytes + HOLD_BACK_BYTES <= device_bytes,
        "{all_bytes} of {device_bytes}"
    );
    seen.sort_unstable();
    let count = seen.len();
    seen.dedup();
    prop_assert_eq!(seen.len(), count, "somebody is in two partitions");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn partitions_never_need_more_than_they_have(events in events(), device_gib in 1u64..80) {
        let mut table = PartitionTable::new(HOLD_BACK_BYTES);
        table.set_device_bytes(device_gib * GIB);
        for event in events {
            match event {
                Event::Says { id, persistent_mib, ephemeral_mib } => {
                    let memory = Memory {
                        persistent_bytes: persistent_mib << 20,
                        ephemeral_bytes: ephemeral_mib << 20,
                    };
                    let free_bytes = table.free_bytes();
                    let known = table.partition(TenantId(id)).is_some();
                    let admitted = table.admit(TenantId(id), memory);
                    prop_assert_eq!(admitted.ok(), table.partition(TenantId(id)));
                    prop_assert!(
                        known || admitted.is_ok() || memory.peak_bytes() > free_bytes,
                        "refused although it fits alone"
                    );
                }
                Event::Goes { id } => {
                    table.remove(TenantId(id));
                    prop_assert!(table.partition(TenantId(id)).is_none());
                }
            }
            check(&table, device_gib * GIB)?;
        }
    }
}
