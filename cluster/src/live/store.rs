//! What outlives the hook: jobs, nodes, orders, pairs, in an embedded database (`redb`: one file,
//! copy-on-write, every commit synced).
//!
//! A change is one transaction, and nothing is sent before it is committed; so the successor of a
//! hook that was killed at any instruction knows everything that it ever sent. The database holds a
//! lock on its file: a second hook on the same state is refused. Every opening counts the epoch up.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use redb::{Database, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::records::{Changes, Kept, Meta, crowd_key, pair_key, solo_key};
use super::wire::HookId;

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const NODES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("nodes");
const JOBS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("jobs");
const ORDERS: TableDefinition<'_, (&str, u64), &[u8]> = TableDefinition::new("orders");
const PAIRS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pairs");
const CROWDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("crowds");
const SOLOS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("solos");
const SPEEDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("speeds");
const SERVICES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("services");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");

/// Version of what is in the tables.
const FORMAT: u32 = 1;
/// Lines of the decision log that are kept.
const LOG_KEPT: u64 = 10_000;

/// Why there is no state.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another hook has it.
    #[error(
        "another hook runs on {}: end it first, or give this one a --state of its own", .0.display()
    )]
    Taken(PathBuf),
    /// The directory is of no use.
    #[error("the state directory {} cannot be used: {why}", .path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The database failed.
    #[error("the state in {} cannot be {what}: {why}", .path.display())]
    Database {
        /// Which.
        path: PathBuf,
        /// `read`, `written`.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// It is of another version.
    #[error(
        "the state in {} has format {theirs}, this hook writes {FORMAT}: use the `sublet` that made it, or another --state", .path.display()
    )]
    Format {
        /// Which.
        path: PathBuf,
        /// Its format.
        theirs: u32,
    },
}

/// What the database or a record in it is wrong with.
type Fault = Box<dyn std::error::Error + Send + Sync>;

/// The database.
#[derive(Debug)]
pub struct Store {
    database: Database,
    path: PathBuf,
    /// What is counted and drawn.
    pub meta: Meta,
}

impl Store {
    /// Opens the state in a directory, which is made if missing, counts the epoch up and draws the
    /// nonce.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(dir: &Path, unix_ms: u64) -> Result<(Self, Kept, HookId), StoreError> {
        let directory = |why: String| StoreError::Directory {
            path: dir.to_owned(),
            why,
        };
        match fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(dir)
        {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(directory(error.to_string())),
        }
        let others = private(dir).map_err(|error| directory(error.to_string()))?;
        if let Some(mode) = others {
            return Err(directory(format!(
                "others can write to it (mode {mode:04o}): run `chmod go-w` on it"
            )));
        }
        let path = dir.join("hook.redb");
        // It contains jobs' variables: only its owner may read it, whatever the umask says.
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // CAST: flags of open(2) are an int.
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600)));
        file.map_err(|error| directory(format!("{}: {error}", path.display())))?;
        let database = Database::create(&path).map_err(|error| match error {
            redb::DatabaseError::DatabaseAlreadyOpen => StoreError::Taken(dir.to_owned()),
            error => StoreError::Database {
                path: path.clone(),
                what: "opened",
                why: error.to_string(),
            },
        })?;
        let failed = |what| {
            let path = path.clone();
            move |error: Fault| StoreError::Database {
                path: path.clone(),
                what,
                why: error.to_string(),
            }
        };
        let mut kept = read(&database).map_err(failed("read"))?;
        let mut meta = kept.0.take().unwrap_or_default();
        if meta.format != 0 && meta.format != FORMAT {
            return Err(StoreError::Format {
                path,
                theirs: meta.format,
            });
        }
        if meta.format == 0 {
            let cluster =
                random_word().map_err(|error| directory(format!("no random numbers: {error}")))?;
            meta = Meta {
                format: FORMAT,
                cluster,
                origin_unix_ms: unix_ms,
                last_ms: unix_ms,
                last_unix_ms: unix_ms,
                next_job: 1,
                next_order: 1,
                next_line: 1,
                ..Meta::default()
            };
        }
        meta.epoch += 1;
        let nonce =
            random_word().map_err(|error| directory(format!("no random numbers: {error}")))?;
        let id = HookId {
            cluster: meta.cluster.clone(),
            epoch: meta.epoch,
            nonce,
        };
        let mut store = Self {
            database,
            path,
            meta,
        };
        store.commit(&Changes::default(), true)?;
        Ok((store, kept.1, id))
    }

    /// Writes changes as one transaction. `meta`: also the counters, if nothing else changed.
    ///
    /// # Errors
    /// [`StoreError::Database`]. What was written then is not known: the hook has to end and be
    /// started again.
    pub fn commit(&mut self, changes: &Changes, meta: bool) -> Result<(), StoreError> {
        if changes.is_empty() && !meta {
            return Ok(());
        }
        self.write(changes).map_err(|error| StoreError::Database {
            path: self.path.clone(),
            what: "written",
            why: error.to_string(),
        })
    }

    fn write(&self, changes: &Changes) -> Result<(), Fault> {
        let transaction = self.database.begin_write()?;
        {
            transaction
                .open_table(META)?
                .insert("meta", json(&self.meta).as_slice())?;
            let mut jobs = transaction.open_table(JOBS)?;
            for job in &changes.jobs {
                jobs.insert(job.id, json(job).as_slice())?;
            }
            for id in &changes.dropped_jobs {
                jobs.remove(id)?;
            }
            let mut nodes = transaction.open_table(NODES)?;
            for name in &changes.dropped_nodes {
                nodes.remove(name.as_str())?;
            }
            for node in &changes.nodes {
                nodes.insert(node.name.as_str(), json(node).as_slice())?;
            }
            let mut orders = transaction.open_table(ORDERS)?;
            for (node, order) in &changes.orders {
                orders.insert((node.as_str(), order.seq), json(order).as_slice())?;
            }
            for (node, seq) in &changes.dropped_orders {
                orders.remove((node.as_str(), *seq))?;
            }
            let mut pairs = transaction.open_table(PAIRS)?;
            // What made way and was measured again is there.
            for key in &changes.dropped_pairs {
                pairs.remove(key.as_str())?;
            }
            for pair in &changes.pairs {
                pairs.insert(pair_key(pair).as_str(), json(pair).as_slice())?;
            }
            let mut crowds = transaction.open_table(CROWDS)?;
            for key in &changes.dropped_crowds {
                crowds.remove(key.as_str())?;
            }
            for crowd in &changes.crowds {
                crowds.insert(crowd_key(crowd).as_str(), json(crowd).as_slice())?;
            }
            let mut solos = transaction.open_table(SOLOS)?;
            for key in &changes.dropped_solos {
                solos.remove(key.as_str())?;
            }
            for (key, solo) in &changes.solos {
                solos.insert(key.as_str(), json(solo).as_slice())?;
            }
            let mut speeds = transaction.open_table(SPEEDS)?;
            for key in &changes.dropped_speeds {
                speeds.remove(key.as_str())?;
            }
            for speed in &changes.speeds {
                let key = solo_key(&speed.gpu, speed.gpus, &speed.kind);
                speeds.insert(key.as_str(), json(speed).as_slice())?;
            }
            let mut services = transaction.open_table(SERVICES)?;
            for job in &changes.dropped_services {
                services.remove(job)?;
            }
            for service in &changes.services {
                services.insert(service.job, json(service).as_slice())?;
            }
            let mut log = transaction.open_table(LOG)?;
            for line in &changes.log {
                log.insert(line.seq, json(line).as_slice())?;
                if let Some(old) = line.seq.checked_sub(LOG_KEPT) {
                    log.remove(old)?;
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    // PANIC: records hold strings and numbers; a number that is none becomes null.
    serde_json::to_vec(value).expect("records can be written")
}

fn read(database: &Database) -> Result<(Option<Meta>, Kept), Fault> {
    // A transaction that writes makes the tables that are missing.
    let transaction = database.begin_write()?;
    let mut kept = Kept::default();
    let meta;
    {
        let table = transaction.open_table(META)?;
        meta = table
            .get("meta")?
            .map(|value| parse(value.value()))
            .transpose()?;
        for row in transaction.open_table(NODES)?.iter()? {
            kept.nodes.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(JOBS)?.iter()? {
            kept.jobs.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(ORDERS)?.iter()? {
            let (key, value) = row?;
            kept.orders
                .push((key.value().0.to_owned(), parse(value.value())?));
        }
        for row in transaction.open_table(PAIRS)?.iter()? {
            kept.pairs.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(CROWDS)?.iter()? {
            kept.crowds.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(SOLOS)?.iter()? {
            let (key, value) = row?;
            kept.solos
                .push((key.value().to_owned(), parse(value.value())?));
        }
        for row in transaction.open_table(SPEEDS)?.iter()? {
            kept.speeds.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(SERVICES)?.iter()? {
            kept.services.push(parse(row?.1.value())?);
        }
        for row in transaction.open_table(LOG)?.iter()? {
            kept.log.push(parse(row?.1.value())?);
        }
    }
    transaction.commit()?;
    Ok((meta, kept))
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(bytes).map_err(|error| format!("a record: {error}").into())
}

/// The mode of a directory that others can write to, or swap what is in it.
fn private(dir: &Path) -> io::Result<Option<u32>> {
    let mode = fs::metadata(dir)?.mode() & 0o7777;
    Ok((mode & 0o022 != 0).then_some(mode))
}

/// 64 random bits as hexadecimal digits.
///
/// # Errors
/// Where the host has no random numbers.
pub fn random_word() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::records::{
        CrowdRecord, JobRecord, PairRecord, Service, Solo, SpeedRecord, Witness,
    };
    use crate::live::wire::{Order, RunId, What};

    #[test]
    fn what_was_committed_is_there_again_and_the_epoch_counts() {
        let dir = tempfile::tempdir().unwrap();
        let job = JobRecord {
            id: 7,
            done_s: 1.5,
            ..JobRecord::default()
        };
        let (mut store, kept, first) = Store::open(dir.path(), 1000).unwrap();
        assert!(kept.jobs.is_empty());
        store.meta.next_job = 8;
        let order = Order {
            epoch: 1,
            seq: 3,
            run: RunId { job: 7, attempt: 1 },
            what: What::Stop {
                grace_s: 1.0,
                signal: None,
            },
        };
        let changes = Changes {
            jobs: vec![job.clone()],
            orders: vec![("a".into(), order.clone()), ("b".into(), order.clone())],
            ..Changes::default()
        };
        store.commit(&changes, false).unwrap();
        let dropped = Changes {
            dropped_orders: vec![("b".into(), 3)],
            ..Changes::default()
        };
        store.commit(&dropped, false).unwrap();
        drop(store);
        let (store, kept, second) = Store::open(dir.path(), 2000).unwrap();
        assert_eq!(kept.jobs, [job]);
        assert_eq!(kept.orders, [("a".to_owned(), order)]);
        assert_eq!((store.meta.next_job, store.meta.origin_unix_ms), (8, 1000));
        assert_eq!(
            (first.cluster, first.epoch + 1),
            (second.cluster, second.epoch)
        );
        assert_ne!(first.nonce, second.nonce);
    }

    #[test]
    fn what_made_way_and_was_measured_again_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let pair = PairRecord {
            gpu: "T4".into(),
            gpus: 1,
            ..PairRecord::default()
        };
        let crowd = CrowdRecord {
            gpu: "T4".into(),
            kinds: ["b", "a", "a"].map(str::to_owned).into(),
            rates: vec![0.5, 0.25, 0.25],
            ..CrowdRecord::default()
        };
        let solo = ("T4\n1\na".to_owned(), Solo::default());
        let speed = SpeedRecord {
            gpu: "T4".into(),
            gpus: 1,
            kind: "a".into(),
            witnesses: vec![Witness::default()],
        };
        let service = Service {
            job: 3,
            gpu_s: 1.5,
            ..Service::default()
        };
        let changes = Changes {
            dropped_pairs: vec![pair_key(&pair)],
            dropped_solos: vec![solo.0.clone()],
            pairs: vec![pair.clone()],
            dropped_crowds: vec![crowd_key(&crowd)],
            crowds: vec![crowd.clone()],
            solos: vec![solo.clone()],
            dropped_speeds: vec![solo.0.clone()],
            speeds: vec![speed.clone()],
            dropped_services: vec![3],
            services: vec![service.clone()],
            ..Changes::default()
        };
        let (mut store, ..) = Store::open(dir.path(), 1).unwrap();
        store.commit(&changes, false).unwrap();
        drop(store);
        let (_, kept, _) = Store::open(dir.path(), 2).unwrap();
        assert_eq!((kept.pairs, kept.solos), (vec![pair], vec![solo]));
        assert_eq!(kept.crowds, [crowd]);
        assert_eq!((kept.speeds, kept.services), (vec![speed], vec![service]));
    }

    #[test]
    fn only_the_owner_can_read_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        drop(Store::open(&state, 1).unwrap());
        let mode = |name: &str| fs::metadata(state.join(name)).unwrap().mode() & 0o777;
        assert_eq!((mode(""), mode("hook.redb")), (0o700, 0o600));
        let open = |mode| fs::Permissions::from_mode(mode);
        fs::set_permissions(state.join("hook.redb"), open(0o644)).unwrap();
        drop(Store::open(&state, 1).unwrap());
        assert_eq!(mode("hook.redb"), 0o600, "one of an earlier version");
        fs::set_permissions(&state, open(0o777)).unwrap();
        let error = Store::open(&state, 1).unwrap_err().to_string();
        assert!(error.contains("0777") && error.contains("chmod"), "{error}");
    }

    #[test]
    fn a_second_hook_is_refused_while_the_first_lives() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path(), 1).unwrap();
        let error = Store::open(dir.path(), 1).unwrap_err();
        assert!(matches!(error, StoreError::Taken(_)), "{error}");
        assert!(error.to_string().contains("--state"), "{error}");
        drop(first);
        assert!(Store::open(dir.path(), 1).is_ok());
    }

    #[test]
    fn a_file_that_is_no_state_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("hook.redb"), b"not a database at all").unwrap();
        let error = Store::open(dir.path(), 1).unwrap_err().to_string();
        assert!(error.contains("hook.redb"), "{error}");
    }
}
