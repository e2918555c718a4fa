//! The gRPC interface of llm-d's RL time slicing, for the groups of this host's arbiter.
//!
//! Translates and keeps nothing: each call is a request to the arbiter, made with the rights of
//! this process, and only root and its own user may call. A call to acquire keeps a connection to
//! the arbiter for as long as it waits; when its caller hangs up that connection ends, and the
//! arbiter forgets it. So many wait at a time that the other calls always have a thread.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream as Connection;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use control::{
    Acquire, Acquired, Client, ClientError, ErrorCode, GiveUp, GroupMember, GroupState,
    GroupStatus, Turn,
};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, oneshot};
use tonic::Status;

use crate::grpc::{self, Answering, Call, Service};
use crate::proto::timeslice as v1alpha1;
use crate::sockets;

/// Calls to acquire that wait at a time: as many as the arbiter takes of one user.
const WAITING: usize = 24;
/// Threads for calls that do not wait.
const AT_ONCE: usize = 16;
/// Connections: a job has one or two.
const CONNECTIONS: usize = 64;
/// TIMEOUT: far above the time of any answer of the arbiter that does not wait for a turn.
const ANSWER: Duration = Duration::from_secs(10);
/// TIMEOUT: who calls says how long it waits, and hangs up then. A week is for ever.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The groups of an arbiter.
struct Orchestrator {
    arbiter: PathBuf,
    waiting: Arc<Semaphore>,
    host: String,
}

/// Serves at `path` for the arbiter whose API socket this is, until the socket is broken.
///
/// # Errors
/// It cannot listen there, or not any more.
pub fn serve(path: &Path, arbiter: &Path) -> io::Result<()> {
    let listener = sockets::listen(path).map_err(io::Error::other)?;
    listener.set_nonblocking(true)?;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let orchestrator = Arc::new(Orchestrator {
        arbiter: arbiter.to_owned(),
        waiting: Arc::new(Semaphore::new(WAITING)),
        host: host.to_string_lossy().into_owned(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(WAITING + AT_ONCE)
        .build()?;
    crate::say!("the gRPC interface is at unix:{}", path.display());
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener)?;
        Err(grpc::serve(listener, orchestrator, CONNECTIONS).await)
    })
}

impl Service for Orchestrator {
    fn answer(self: Arc<Self>, path: String, call: Call) -> Answering {
        let method = v1alpha1::SERVICES
            .iter()
            .find_map(|service| path.strip_prefix(service));
        match method {
            Some("Acquire") => grpc::later(call, move |asked| self.acquire(asked)),
            Some("Yield") => grpc::unary(call, move |asked| self.give_up(asked)),
            Some("ListGroups") => {
                grpc::unary(call, move |_: v1alpha1::ListGroupsRequest| self.list())
            }
            Some("GetGroupStatus") => grpc::unary(call, move |asked| self.status(&asked)),
            _ => grpc::unknown(&path),
        }
    }
}

/// Ends a connection to the arbiter when it is dropped, and with it the request that waits there.
#[derive(Default)]
struct Line(Arc<Mutex<Held>>);

#[derive(Default)]
enum Held {
    #[default]
    Nothing,
    Open(Connection),
    Over,
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Held::Open(connection) = std::mem::replace(&mut *self.0.lock(), Held::Over) {
            // One that has ended by itself needs no end.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Orchestrator {
    async fn acquire(
        self: Arc<Self>,
        asked: v1alpha1::JobRequest,
    ) -> Result<v1alpha1::AcquireResponse, Status> {
        let Ok(place) = Arc::clone(&self.waiting).try_acquire_owned() else {
            let message = format!("{WAITING} calls wait for turns already: try again");
            return Err(Status::resource_exhausted(message));
        };
        // Dropped with this future, which is when the caller hangs up.
        let line = Line::default();
        let held = Arc::clone(&line.0);
        let (answer, hears) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let _ = answer.send(ask_for_turn(&self.arbiter, &asked, &held));
            drop(place);
        });
        let answered = hears
            .await
            .map_err(|_| Status::internal("a bug of sublet's; see its log"))?;
        drop(line);
        let acquired = answered?;
        Ok(v1alpha1::AcquireResponse {
            success: acquired.acquired,
            waited_ms: i64::try_from(acquired.waited_ms).unwrap_or(i64::MAX),
            context_restored: acquired.restored,
        })
    }

    fn client(&self) -> Result<Client, Status> {
        Client::connect(&self.arbiter, ANSWER).map_err(|error| status_of(&error))
    }

    fn give_up(&self, asked: v1alpha1::JobRequest) -> Result<v1alpha1::YieldResponse, Status> {
        let give_up = GiveUp {
            group: asked.group_id,
        };
        let yielded = self.client()?.give_up(&asked.job_id, &give_up);
        let yielded = yielded.map_err(|error| match &error {
            // As llm-d's answers one that has no turn.
            ClientError::Refused(refusal) if refusal.code == ErrorCode::Refused => {
                Status::permission_denied(error.to_string())
            }
            _ => status_of(&error),
        })?;
        Ok(v1alpha1::YieldResponse {
            success: true,
            pending_waiters: i64::try_from(yielded.waiting).unwrap_or(i64::MAX),
            snapshot_deferred: yielded.stays,
        })
    }

    fn groups(&self) -> Result<Vec<GroupStatus>, Status> {
        self.client()?.groups().map_err(|error| status_of(&error))
    }

    fn list(&self) -> Result<v1alpha1::ListGroupsResponse, Status> {
        let mut group_ids: Vec<String> =
            self.groups()?.into_iter().map(|group| group.name).collect();
        group_ids.sort();
        group_ids.dedup();
        Ok(v1alpha1::ListGroupsResponse { group_ids })
    }

    fn status(
        &self,
        asked: &v1alpha1::GetGroupStatusRequest,
    ) -> Result<v1alpha1::GetGroupStatusResponse, Status> {
        let own = nix::unistd::geteuid().as_raw();
        let mut groups = self.groups()?;
        groups.retain(|group| group.name == asked.group_id);
        // Of several users' groups of that name its own one, or the only one.
        let at = groups
            .iter()
            .position(|group| group.uid == own)
            .unwrap_or(0);
        let Some(group) = groups.get(at) else {
            let shown: String = asked.group_id.chars().take(64).collect();
            return Err(Status::not_found(format!("no job is in a group `{shown}`")));
        };
        Ok(answer_of(group, &self.host))
    }
}

fn ask_for_turn(
    arbiter: &Path,
    asked: &v1alpha1::JobRequest,
    held: &Mutex<Held>,
) -> Result<Acquired, Status> {
    let mut client = Client::connect(arbiter, PATIENCE).map_err(|error| status_of(&error))?;
    let handle = client
        .hang_up_handle()
        .map_err(|error| Status::unavailable(format!("no descriptor is left: {error}")))?;
    {
        let mut held = held.lock();
        if matches!(*held, Held::Over) {
            return Err(Status::cancelled("the caller has hung up"));
        }
        *held = Held::Open(handle);
    }
    let acquire = Acquire {
        group: asked.group_id.clone(),
        timeout_ms: u64::try_from(PATIENCE.as_millis()).unwrap_or(u64::MAX),
    };
    client
        .acquire(&asked.job_id, &acquire)
        .map_err(|error| status_of(&error))
}

fn status_of(error: &ClientError) -> Status {
    let text = error.to_string();
    match error {
        ClientError::Refused(refusal) => match &refusal.code {
            ErrorCode::NoSuchJob | ErrorCode::NoSuchDevice | ErrorCode::NoSuchGroup => {
                Status::not_found(text)
            }
            ErrorCode::Permission => Status::permission_denied(text),
            ErrorCode::Refused => Status::failed_precondition(text),
            ErrorCode::Invalid => Status::invalid_argument(text),
            ErrorCode::Unsupported | ErrorCode::VersionMismatch => Status::unimplemented(text),
            ErrorCode::Internal | ErrorCode::Other(_) => Status::internal(text),
        },
        ClientError::Timeout { .. } => Status::deadline_exceeded(text),
        _ => Status::unavailable(text),
    }
}

fn answer_of(group: &GroupStatus, host: &str) -> v1alpha1::GetGroupStatusResponse {
    let state = match group.state {
        GroupState::Idle => v1alpha1::GroupState::Idle,
        GroupState::Yielded => v1alpha1::GroupState::IdleYielded,
        GroupState::Held => v1alpha1::GroupState::Locked,
        GroupState::Switching => v1alpha1::GroupState::Switching,
        GroupState::Unknown => v1alpha1::GroupState::Unknown,
    };
    let last = group.last.clone().unwrap_or_default();
    let loaded = group.members.iter().find(|member| member.job == last);
    let is_loaded = loaded.is_some_and(|member| member.resident_bytes == member.evictable_bytes);
    let job_state = |member: &GroupMember| v1alpha1::SnapshotAgentJobState {
        agent: host.to_owned(),
        job_state: job_state(member).into(),
        job_id: member.job.clone(),
    };
    v1alpha1::GetGroupStatusResponse {
        group: Some(v1alpha1::GroupStatus {
            group_id: group.name.clone(),
            group_state: state.into(),
            state_timestamp: Some(v1alpha1::Timestamp {
                seconds: i64::try_from(group.since_unix_ms / 1000).unwrap_or(i64::MAX),
                // CAST: below 10^9.
                nanos: (group.since_unix_ms % 1000) as i32 * 1_000_000,
            }),
            locking_job: group.holder.clone().unwrap_or_default(),
            waiter_queue_depth: i64::try_from(group.waiting.len()).unwrap_or(i64::MAX),
            loaded_job: if is_loaded {
                last.clone()
            } else {
                String::new()
            },
            active_job: last,
        }),
        agent_job_states: group.members.iter().map(job_state).collect(),
    }
}

fn job_state(member: &GroupMember) -> v1alpha1::JobState {
    if member.failed {
        return v1alpha1::JobState::Faulted;
    }
    match (member.resident_bytes, member.evictable_bytes) {
        // A job whose memory cannot be moved runs where it has the turn.
        (_, 0) if member.turn == Turn::Holds => v1alpha1::JobState::Running,
        (_, 0) => v1alpha1::JobState::Idle,
        (0, _) => v1alpha1::JobState::Saved,
        (there, all) if there >= all => v1alpha1::JobState::Running,
        _ => v1alpha1::JobState::Transitioning,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_described_in_the_words_of_the_other_side() {
        let member = |job: &str, resident_bytes, turn| GroupMember {
            job: job.into(),
            evictable_bytes: 8,
            resident_bytes,
            turn,
            failed: false,
        };
        let mut group = GroupStatus {
            name: "rl".into(),
            state: GroupState::Held,
            since_unix_ms: 7_250,
            holder: Some("a".into()),
            last: Some("a".into()),
            waiting: vec!["b".into()],
            members: vec![
                member("a", 8, Turn::Holds),
                member("b", 0, Turn::Waits),
                member("c", 3, Turn::None),
            ],
            ..GroupStatus::default()
        };
        let answer = answer_of(&group, "n1");
        let status = answer.group.unwrap();
        assert_eq!(status.group_state(), v1alpha1::GroupState::Locked);
        let stamp = status.state_timestamp.unwrap();
        assert_eq!((stamp.seconds, stamp.nanos), (7, 250_000_000));
        assert_eq!(
            (status.locking_job.as_str(), status.loaded_job.as_str()),
            ("a", "a")
        );
        assert_eq!(status.waiter_queue_depth, 1);
        let states: Vec<_> = answer
            .agent_job_states
            .iter()
            .map(v1alpha1::SnapshotAgentJobState::job_state)
            .collect();
        use v1alpha1::JobState::{Faulted, Running, Saved, Transitioning};
        assert_eq!(states, [Running, Saved, Transitioning]);
        group.state = GroupState::Yielded;
        (group.holder, group.members[0].failed) = (None, true);
        let answer = answer_of(&group, "n1");
        assert_eq!(answer.agent_job_states[0].job_state(), Faulted);
        let status = answer.group.unwrap();
        assert_eq!(status.group_state(), v1alpha1::GroupState::IdleYielded);
        assert_eq!(
            (status.locking_job.as_str(), status.active_job.as_str()),
            ("", "a")
        );
    }

    #[test]
    fn the_file_of_the_interface_has_the_numbers_that_travel() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = folder.join("../docs/reference/timeslice.proto");
        let file = std::fs::read_to_string(file).unwrap();
        let ours = include_str!("proto/timeslice.rs");
        let mut fields = 0;
        let mut package = "";
        for line in file.lines() {
            let line = line.split("//").next().unwrap().trim();
            if let Some(name) = line.strip_prefix("package ") {
                package = name.trim_end_matches(';');
            }
            let Some((left, number)) = line.trim_end_matches(';').split_once(" = ") else {
                continue;
            };
            let name = left.split_whitespace().last().unwrap();
            let Ok(number) = number.parse::<u32>() else {
                continue;
            };
            fields += 1;
            if let Some(word) = name.strip_prefix("STATE_") {
                let word: String = word
                    .split('_')
                    .map(|part| format!("{}{}", &part[..1], part[1..].to_lowercase()))
                    .collect();
                assert!(ours.contains(&format!("    {word} = {number},")), "{name}");
                continue;
            }
            let field = format!("    pub {name}: ");
            let tagged = ours.match_indices(&field).any(|(at, _)| {
                ours[..at]
                    .trim_end()
                    .ends_with(&format!("tag = \"{number}\")]"))
            });
            assert!(tagged, "{name} = {number}");
        }
        assert!(fields > 25, "{fields}");
        assert!(v1alpha1::SERVICES[0].starts_with(&format!("/{package}.")));
    }
}
