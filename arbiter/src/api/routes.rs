//! The operations: every method and path, in one list, and what answers there.
//!
//! What a handler declares (method, path, types) is what the router serves and what
//! [`openapi`](super::openapi) describes. A handler makes a request of what it was sent, and an
//! answer of what the loop replies; it decides nothing.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::handler::Handler;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use control::{
    Acquire, Acquired, ArbiterStatus, Change, ConfigReport, ControlError, DeviceSelector,
    DeviceSettings, DeviceStatus, ErrorCode, Event, GiveUp, GroupStatus, JobSpec, JobStatus, Moved,
    Moves, Profile, Registered, Reloaded, Reply, Request, Timeline, Yielded,
};
use serde::{Deserialize, Serialize};
use utoipa::openapi::HttpMethod;
use utoipa::{IntoParams, ToSchema};

use super::Office;
use super::conversation::Caller;
use super::extract::{Asked, Plain, Query, Varies};
use super::openapi;
use super::problem::{Problem, answer};
use super::stream::{Wanted, follow};

/// One row of the API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Route {
    /// `GET`, ...
    pub method: &'static str,
    /// With `{name}` for what varies.
    pub path: String,
}

type Served = State<Arc<Office>>;
type Answered = Result<Response, Problem>;

/// The row of a handler, by what it declares.
fn row<P, H, T>(handler: H) -> (Route, MethodRouter<Arc<Office>>)
where
    P: utoipa::Path,
    H: Handler<T, Arc<Office>>,
    T: 'static,
{
    let (method, filter) = match P::methods().first() {
        Some(HttpMethod::Get) => ("GET", MethodFilter::GET),
        Some(HttpMethod::Post) => ("POST", MethodFilter::POST),
        Some(HttpMethod::Patch) => ("PATCH", MethodFilter::PATCH),
        // PANIC: the list below has no other.
        _ => unreachable!("a method that no route has"),
    };
    let path = P::path();
    let mut served = on(filter, handler);
    if filter == MethodFilter::GET {
        // The router would answer HEAD as well.
        served = served.on(MethodFilter::HEAD, wrong_method);
    }
    (Route { method, path }, served)
}

/// The whole API.
fn table() -> [(Route, MethodRouter<Arc<Office>>); 22] {
    [
        row::<__path_document, _, _>(document),
        row::<__path_status, _, _>(status),
        row::<__path_jobs, _, _>(jobs),
        row::<__path_register, _, _>(register),
        row::<__path_job, _, _>(job),
        row::<__path_change, _, _>(change),
        row::<__path_profile, _, _>(profile),
        row::<__path_devices, _, _>(devices),
        row::<__path_change_devices, _, _>(change_devices),
        row::<__path_change_device, _, _>(change_device),
        row::<__path_timeline, _, _>(timeline),
        row::<__path_move_jobs, _, _>(move_jobs),
        row::<__path_acquire, _, _>(acquire),
        row::<__path_give_up, _, _>(give_up),
        row::<__path_groups, _, _>(groups),
        row::<__path_group, _, _>(group),
        row::<__path_events, _, _>(events),
        row::<__path_follow_events, _, _>(follow_events),
        row::<__path_config, _, _>(config),
        row::<__path_reload, _, _>(reload),
        row::<__path_refuse_hook, _, _>(refuse_hook),
        row::<__path_shutdown, _, _>(shutdown),
    ]
}

/// The operation that a request is, as it is documented, without a word of the request.
pub fn name_of(method: &Method, path: &str) -> String {
    let is_of = |route: &&Route| {
        let mut parts = path.split('/');
        let mut same = route.path.split('/').map(|part| {
            let given = parts.next();
            given == Some(part) || (part.starts_with('{') && given.is_some_and(|it| !it.is_empty()))
        });
        *method == route.method && same.all(|same| same) && parts.next().is_none()
    };
    ROUTES.iter().find(is_of).map_or_else(
        || "what is no operation".into(),
        |route| format!("{} {}", route.method, route.path),
    )
}

/// The rows of the API.
pub static ROUTES: std::sync::LazyLock<Vec<Route>> =
    std::sync::LazyLock::new(|| table().into_iter().map(|(route, _)| route).collect());

/// What carries requests out.
pub fn router(office: Arc<Office>) -> Router {
    let empty = Router::new();
    let add = |all: Router<_>, (route, served): (Route, _)| all.route(&route.path, served);
    let all = table().into_iter().fold(empty, add);
    all.method_not_allowed_fallback(wrong_method)
        .fallback(nothing)
        .with_state(office)
}

async fn nothing(uri: Uri) -> Problem {
    let path: String = uri.path().chars().take(80).collect();
    Problem::nothing(format!("there is nothing at {path}")).with_hint("see /v1/openapi.json")
}

async fn wrong_method(method: Method, uri: Uri) -> Problem {
    let (path, method): (String, String) = (
        uri.path().chars().take(80).collect(),
        method.as_str().chars().take(20).collect(),
    );
    Problem::wrong_method(format!("{method} is not for {path}")).with_hint("see /v1/openapi.json")
}

/// What a reply is, where it is the one to that request.
macro_rules! expect {
    ($reply:expr, $kind:ident($value:pat) => $take:expr) => {
        match $reply {
            Reply::$kind($value) => $take,
            _ => return Err(Problem::defect("the arbiter answered something else")),
        }
    };
}

fn ok<T: Serialize>(value: &T) -> Answered {
    Ok(answer(StatusCode::OK, value))
}

/// This document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    responses((status = 200, description = "Done.", body = Object)),
)]
async fn document(_: Plain) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    (json, openapi::DOCUMENT.as_str()).into_response()
}

/// The arbiter, its devices and its jobs.
#[utoipa::path(
    get,
    path = "/v1/status",
    responses((status = 200, description = "Done.", body = ArbiterStatus)),
)]
async fn status(caller: Caller, _: Plain) -> Answered {
    expect!(caller.ask(Request::Status).await?, Status(status) => ok(&status))
}

/// All jobs: those that live, then those that have ended lately.
#[utoipa::path(
    get,
    path = "/v1/jobs",
    responses((status = 200, description = "Done.", body = Vec<JobStatus>)),
)]
async fn jobs(caller: Caller, _: Plain) -> Answered {
    expect!(caller.ask(Request::List).await?, Jobs(jobs) => ok(&jobs))
}

/// Registers the process that asks as a job. Processes that it starts with the token in their
/// environment are part of the job.
#[utoipa::path(
    post,
    path = "/v1/jobs",
    request_body = JobSpec,
    responses((status = 201, description = "Done.", body = Registered)),
)]
async fn register(caller: Caller, Asked(mut job): Asked<JobSpec>) -> Answered {
    job.cut_command();
    expect!(
        caller.ask(Request::Register(job)).await?,
        Registered(registered) => Ok(answer(StatusCode::CREATED, &registered))
    )
}

/// One of the jobs, by name.
async fn job_of(caller: &Caller, name: &str) -> Result<JobStatus, Problem> {
    let job = name.to_owned();
    expect!(caller.ask(Request::Job { job }).await?, Job(job) => Ok(*job))
}

/// One job.
#[utoipa::path(
    get,
    path = "/v1/jobs/{job}",
    params(("job" = String, Path, description = "Its name.")),
    responses((status = 200, description = "Done.", body = JobStatus)),
)]
async fn job(caller: Caller, Varies(name): Varies, _: Plain) -> Answered {
    ok(&job_of(&caller, &name).await?)
}

/// Changes a running job: pauses it or has it go on, asks it to change its size, or gives it other
/// settings (those that are live). All of it or nothing. The answer is the job as it then stands.
#[utoipa::path(
    patch,
    path = "/v1/jobs/{job}",
    params(("job" = String, Path, description = "Its name.")),
    request_body = Change,
    responses((status = 200, description = "Done.", body = JobStatus)),
)]
async fn change(caller: Caller, Varies(job): Varies, Asked(change): Asked<Change>) -> Answered {
    expect!(caller.ask(Request::Set { job, change }).await?, Changed(job) => ok(&job))
}

/// What is known of a job's iterations, memory and copies; `null`: nothing yet.
#[utoipa::path(
    get,
    path = "/v1/jobs/{job}/profile",
    params(("job" = String, Path, description = "Its name.")),
    responses((status = 200, description = "Done.", body = Option<Profile>)),
)]
async fn profile(caller: Caller, Varies(name): Varies, _: Plain) -> Answered {
    ok(&job_of(&caller, &name).await?.profile)
}

/// All devices.
#[utoipa::path(
    get,
    path = "/v1/devices",
    responses((status = 200, description = "Done.", body = Vec<DeviceStatus>)),
)]
async fn devices(caller: Caller, _: Plain) -> Answered {
    expect!(caller.ask(Request::Devices).await?, Devices(devices) => ok(&devices))
}

async fn run_as(
    caller: &Caller,
    device: Option<DeviceSelector>,
    settings: DeviceSettings,
) -> Answered {
    let request = Request::SetDevice { device, settings };
    expect!(caller.ask(request).await?, Devices(devices) => ok(&devices))
}

/// Changes how all devices are run, until the quota file is read again.
#[utoipa::path(
    patch,
    path = "/v1/devices",
    request_body = DeviceSettings,
    responses((status = 200, description = "Done.", body = Vec<DeviceStatus>)),
)]
async fn change_devices(caller: Caller, Asked(settings): Asked<DeviceSettings>) -> Answered {
    run_as(&caller, None, settings).await
}

/// Changes how a device is run, until the quota file is read again.
#[utoipa::path(
    patch,
    path = "/v1/devices/{device}",
    params(("device" = String, Path, description = "Its index or its UUID.")),
    request_body = DeviceSettings,
    responses((status = 200, description = "Done.", body = Vec<DeviceStatus>)),
)]
async fn change_device(
    caller: Caller,
    Varies(device): Varies,
    Asked(settings): Asked<DeviceSettings>,
) -> Answered {
    run_as(&caller, Some(selector(&device)?), settings).await
}

fn selector(text: &str) -> Result<DeviceSelector, Problem> {
    let shown: String = text.chars().take(80).collect();
    text.parse().map_err(|_| {
        let error = control::BadDevice(shown).to_string();
        Problem::from(ControlError::new(ErrorCode::NoSuchDevice, error))
    })
}

/// Part of a device's timeline.
#[derive(Deserialize, IntoParams, Default)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Part {
    /// Spans above this number.
    since_seq: u64,
    /// So many at most; 0: as many as one answer has.
    limit: u32,
}

/// What a device did lately, span by span.
#[utoipa::path(
    get,
    path = "/v1/devices/{device}/timeline",
    params(("device" = u32, Path, description = "Its index."), Part),
    responses((status = 200, description = "Done.", body = Timeline)),
)]
async fn timeline(caller: Caller, Varies(device): Varies, Query(part): Query<Part>) -> Answered {
    let shown: String = device.chars().take(80).collect();
    let device = device.parse().map_err(|_| {
        let text = format!("`{shown}` is no index of a device");
        Problem::from(ControlError::new(ErrorCode::NoSuchDevice, text))
    })?;
    let request = Request::Timeline {
        device,
        since_seq: part.since_seq,
        limit: part.limit,
    };
    expect!(caller.ask(request).await?, Timeline(timeline) => ok(&timeline))
}

/// Moves jobs between device and host, all at once: evictions make space for restores. Answered
/// when every job has arrived or cannot.
#[utoipa::path(
    post,
    path = "/v1/moves",
    request_body = Moves,
    responses((status = 200, description = "Done, as far as each outcome says.", body = Moved)),
)]
async fn move_jobs(caller: Caller, Asked(moves): Asked<Moves>) -> Answered {
    expect!(caller.ask(Request::Move(moves)).await?, Moved(moved) => ok(&moved))
}

/// Has a job wait for the turn of its group, which it joins where it is in none. Answered when it
/// has the turn and its memory is back, or when it has waited as long as it may. A connection that
/// ends before that has asked for nothing.
#[utoipa::path(
    post,
    path = "/v1/jobs/{job}/acquire",
    params(("job" = String, Path, description = "Its name.")),
    request_body = Acquire,
    responses((status = 200, description = "Done, where it says `acquired`.", body = Acquired)),
)]
async fn acquire(caller: Caller, Varies(job): Varies, Asked(acquire): Asked<Acquire>) -> Answered {
    let request = Request::Acquire { job, acquire };
    expect!(caller.ask(request).await?, Acquired(acquired) => ok(&acquired))
}

/// Gives a job's turn up: it stops at once. Its memory stays until another job of the group asks
/// for the turn, or somebody for memory.
#[utoipa::path(
    post,
    path = "/v1/jobs/{job}/yield",
    params(("job" = String, Path, description = "Its name.")),
    request_body = GiveUp,
    responses((status = 200, description = "Done.", body = Yielded)),
)]
async fn give_up(caller: Caller, Varies(job): Varies, Asked(give_up): Asked<GiveUp>) -> Answered {
    let request = Request::Yield { job, give_up };
    expect!(caller.ask(request).await?, Yielded(yielded) => ok(&yielded))
}

/// The groups of jobs that take turns by themselves.
#[utoipa::path(
    get,
    path = "/v1/groups",
    responses((status = 200, description = "Done.", body = Vec<GroupStatus>)),
)]
async fn groups(caller: Caller, _: Plain) -> Answered {
    expect!(caller.ask(Request::Groups).await?, Groups(groups) => ok(&groups))
}

/// The groups of this name: one of each user who has such a group.
#[utoipa::path(
    get,
    path = "/v1/groups/{group}",
    params(("group" = String, Path, description = "Its name.")),
    responses((status = 200, description = "Done.", body = Vec<GroupStatus>)),
)]
async fn group(caller: Caller, Varies(name): Varies, _: Plain) -> Answered {
    let groups = expect!(caller.ask(Request::Groups).await?, Groups(groups) => groups);
    let named: Vec<GroupStatus> = groups.into_iter().filter(|one| one.name == name).collect();
    if named.is_empty() {
        let shown: String = name.chars().take(control::NAME_MAX_BYTES).collect();
        let text = format!("no job is in a group `{shown}`");
        let error = ControlError::new(ErrorCode::NoSuchGroup, text);
        return Err(Problem::from(error.with_hint("see /v1/groups")));
    }
    ok(&named)
}

/// Lines of the journal.
#[derive(Deserialize, IntoParams, Default)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Lines {
    /// Lines above this number.
    since_seq: u64,
    /// So many at most; 0: as many as the arbiter keeps.
    limit: u32,
}

/// Lines of the journal, oldest first.
#[utoipa::path(
    get,
    path = "/v1/events",
    params(Lines),
    responses((status = 200, description = "Done.", body = Vec<Event>)),
)]
async fn events(caller: Caller, Query(lines): Query<Lines>) -> Answered {
    let request = Request::Events {
        since_seq: lines.since_seq,
        limit: lines.limit,
    };
    expect!(caller.ask(request).await?, Events(events) => ok(&events))
}

/// What of the journal is followed.
#[derive(Deserialize, IntoParams, Default)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Followed {
    /// Lines above this number, and then those that come; left out: those that come.
    since_seq: Option<u64>,
    /// Lines about the job of this name only.
    job: Option<String>,
    /// Lines of this kind only.
    kind: Option<String>,
}

/// Follows the journal: each line is an event with its kind as name and its number as id. An event
/// `missed` counts lines that are not kept any more, and has `restarted` where numbers have begun
/// anew; `error` is the last one.
#[utoipa::path(
    get,
    path = "/v1/events/stream",
    params(
        Followed,
        ("Last-Event-ID" = Option<u64>, Header, description = "Goes on after this number."),
    ),
    responses((
        status = 200,
        description = "Server-sent events, without end.",
        body = String,
        content_type = "text/event-stream",
    )),
)]
async fn follow_events(
    State(office): Served,
    caller: Caller,
    headers: HeaderMap,
    Query(wanted): Query<Followed>,
) -> Answered {
    let last = headers.get("last-event-id").map(|text| {
        let number = text.to_str().ok().and_then(|text| text.trim().parse().ok());
        number.ok_or_else(|| Problem::malformed("`Last-Event-ID` is no number of a line"))
    });
    let last: Option<u64> = last.transpose()?;
    let wanted = Wanted {
        since_seq: last.or(wanted.since_seq),
        job: wanted.job,
        kind: wanted.kind,
    };
    follow(caller, &office, wanted)
}

/// Whose configuration.
#[derive(Deserialize, IntoParams, Default)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Whose {
    /// Of the job that this process is part of.
    pid: Option<u32>,
    /// Of a job of this user that asks for nothing; left out: of the user who asks.
    user: Option<String>,
}

/// The quota files in force, and what they give.
#[utoipa::path(
    get,
    path = "/v1/config",
    params(Whose),
    responses((status = 200, description = "Done.", body = ConfigReport)),
)]
async fn config(caller: Caller, Query(whose): Query<Whose>) -> Answered {
    let request = Request::Config {
        pid: whose.pid,
        user: whose.user,
    };
    expect!(caller.ask(request).await?, Config(report) => ok(&report))
}

/// Reads the quota files again; where they are wrong, everything stays as it was.
#[utoipa::path(
    post,
    path = "/v1/reload",
    responses((status = 200, description = "Done.", body = Reloaded)),
)]
async fn reload(caller: Caller, _: Plain) -> Answered {
    expect!(caller.ask(Request::Reload).await?, Reloaded(reloaded) => ok(&reloaded))
}

/// A hook that this node's agent does not listen to.
#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct HookRefusal {
    /// Its address.
    hook: String,
    /// Why; one line.
    reason: String,
}

/// Nothing more to say.
#[derive(Serialize, ToSchema)]
pub(super) struct Done {}

/// Notes in the journal which hook this node's agent refuses, and why.
#[utoipa::path(
    post,
    path = "/v1/hook-refusals",
    request_body = HookRefusal,
    responses((status = 200, description = "Done.", body = Done)),
)]
async fn refuse_hook(caller: Caller, Asked(refusal): Asked<HookRefusal>) -> Answered {
    let request = Request::HookRefused {
        hook: refusal.hook,
        reason: refusal.reason,
    };
    match caller.ask(request).await? {
        Reply::Noted => ok(&Done {}),
        _ => Err(Problem::defect("the arbiter answered something else")),
    }
}

/// Ends the arbiter; jobs go on as their `on_arbiter_loss` says.
#[utoipa::path(
    post,
    path = "/v1/shutdown",
    responses((status = 202, description = "It ends.", body = Done)),
)]
async fn shutdown(caller: Caller, _: Plain) -> Answered {
    match caller.ask(Request::Shutdown).await? {
        Reply::ShuttingDown => Ok(answer(StatusCode::ACCEPTED, &Done {})),
        _ => Err(Problem::defect("the arbiter answered something else")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_named_without_a_word_of_it() {
        for (method, path, name) in [
            (Method::PATCH, "/v1/jobs/hunter2", "PATCH /v1/jobs/{job}"),
            (Method::POST, "/v1/jobs", "POST /v1/jobs"),
            (Method::POST, "/v1/jobs/", "what is no operation"),
            (Method::PATCH, "/v1/jobs/", "what is no operation"),
            (Method::PATCH, "/v1/jobs/a/b", "what is no operation"),
            (Method::DELETE, "/v1/jobs/a", "what is no operation"),
            (Method::POST, "", "what is no operation"),
        ] {
            assert_eq!(name_of(&method, path), name, "{method} {path}");
        }
    }
}
