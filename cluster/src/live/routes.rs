//! The routes: every method and path, in one list, and what answers there.
//!
//! What a handler declares (method, path, types) is what the router serves and what
//! [`openapi`] describes. Handlers may wait, for the hook's lock and its disk: requests of those
//! who know the token are carried out on threads of their own. Those of open routes may not.

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, RawQuery, Request};
use axum::extract::{State, rejection::BytesRejection};
use axum::handler::Handler;
use axum::http::request::Parts;
use axum::http::{Method, Uri};
use axum::routing::{MethodFilter, MethodRouter, on};
use control::{ControlError, ErrorCode};
use serde::de::DeserializeOwned;
use utoipa::openapi::HttpMethod;

use super::auth::Challenge;
use super::http::server::{Response, problem};
use super::openapi;
use super::placement::{DecideRequest, Decided};
use super::service::{Service, refusal};
use super::wire::{
    Away, DecisionView, Fed, Feed, Health, HookStatus, JobView, KindView, NodeView, Orders,
    Registration, Report, Submission, Welcome,
};

/// One row of the API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Route {
    /// `GET`, ...
    pub method: &'static str,
    /// With `{name}` for what varies.
    pub path: String,
    /// Asked without a token, too.
    pub open: bool,
}

type Served = State<Arc<Service>>;

/// The row of a handler, by what it declares.
fn row<P, H, T>(open: bool, handler: H) -> (Route, MethodRouter<Arc<Service>>)
where
    P: utoipa::Path,
    H: Handler<T, Arc<Service>>,
    T: 'static,
{
    let (method, filter) = match P::methods().first() {
        Some(HttpMethod::Get) => ("GET", MethodFilter::GET),
        Some(HttpMethod::Post) => ("POST", MethodFilter::POST),
        Some(HttpMethod::Put) => ("PUT", MethodFilter::PUT),
        Some(HttpMethod::Delete) => ("DELETE", MethodFilter::DELETE),
        // PANIC: the list below has no other.
        _ => unreachable!("a method that no route has"),
    };
    let route = Route {
        method,
        path: P::path(),
        open,
    };
    let mut served = on(filter, handler);
    if filter == MethodFilter::GET {
        // The router would answer HEAD as well.
        served = served.on(MethodFilter::HEAD, wrong_method);
    }
    (route, served)
}

/// The whole API.
fn table() -> [(Route, MethodRouter<Arc<Service>>); 17] {
    const OPEN: bool = true;
    const PROVEN: bool = false;
    [
        row::<__path_session, _, _>(OPEN, session),
        row::<__path_document, _, _>(OPEN, document),
        row::<__path_health, _, _>(OPEN, health),
        row::<__path_status, _, _>(PROVEN, status),
        row::<__path_decisions, _, _>(PROVEN, decisions),
        row::<__path_decide, _, _>(PROVEN, decide),
        row::<__path_jobs, _, _>(PROVEN, jobs),
        row::<__path_submit, _, _>(PROVEN, submit),
        row::<__path_job, _, _>(PROVEN, job),
        row::<__path_cancel, _, _>(PROVEN, cancel),
        row::<__path_register, _, _>(PROVEN, register),
        row::<__path_report, _, _>(PROVEN, report),
        row::<__path_forget, _, _>(PROVEN, forget),
        row::<__path_retry, _, _>(PROVEN, retry),
        row::<__path_kinds, _, _>(PROVEN, kinds),
        row::<__path_feed, _, _>(PROVEN, feed),
        row::<__path_away, _, _>(PROVEN, away),
    ]
}

/// The rows of the API.
pub static ROUTES: LazyLock<Vec<Route>> =
    LazyLock::new(|| table().into_iter().map(|(route, _)| route).collect());

/// What carries requests out whose senders are known.
pub fn router(service: Arc<Service>) -> Router {
    let empty = Router::new();
    let add = |all: Router<_>, (route, served): (Route, _)| all.route(&route.path, served);
    let all = table().into_iter().fold(empty, add);
    all.method_not_allowed_fallback(wrong_method)
        .fallback(nothing)
        // Bodies are bounded before they are read.
        .layer(DefaultBodyLimit::disable())
        .with_state(service)
}

async fn nothing(uri: Uri) -> Response {
    nothing_at(uri.path())
}

fn nothing_at(path: &str) -> Response {
    problem(
        404,
        &format!("there is nothing at {path}; see /v1/openapi.json"),
    )
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    problem(405, &format!("{method} is not for {}", uri.path()))
}

/// What stands in the path for the part that varies.
struct Varies(String);

impl<S: Send + Sync> FromRequestParts<S> for Varies {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            // No text.
            Err(_) => Err(nothing_at(parts.uri.path())),
        }
    }
}

impl Varies {
    fn job(&self) -> Result<u64, ControlError> {
        self.0.parse().map_err(|_| {
            let text = format!("`{}` is no number of a job", self.0);
            ControlError::new(ErrorCode::NoSuchJob, text)
        })
    }
}

/// A body as JSON.
struct Asked<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Asked<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let unread = |error: BytesRejection| problem(400, &error.to_string());
        let body = Bytes::from_request(request, state).await.map_err(unread)?;
        serde_json::from_slice(&body).map(Self).map_err(|error| {
            let text = format!("the body makes no sense: {error}");
            refusal(&ControlError::new(ErrorCode::Invalid, text))
        })
    }
}

/// Begins a session on this connection: the hook proves that it knows the token.
#[utoipa::path(
    get,
    path = "/v1/session",
    params(
        ("nonce" = String, Query, pattern = "^[0-9a-fA-F]{64}$"),
        ("node" = Option<String>, Query, description = "Whose token it is, where it is a node's."),
    ),
    responses((status = 200, description = "Done.", body = Challenge)),
)]
async fn session() -> Response {
    // The first one is answered where connections are.
    problem(400, "this connection has its session")
}

/// This document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    responses((status = 200, description = "Done.", body = Object)),
)]
async fn document() -> Response {
    Response {
        status: 200,
        body: openapi::DOCUMENT.as_bytes().to_vec(),
    }
}

/// Which hook answers.
#[utoipa::path(
    get,
    path = "/v1/health",
    responses((status = 200, description = "Done.", body = Health)),
)]
async fn health(State(service): Served) -> Response {
    service.health()
}

/// The hook, its nodes, its measured pairs.
#[utoipa::path(
    get,
    path = "/v1/status",
    responses((status = 200, description = "Done.", body = HookStatus)),
)]
async fn status(State(service): Served) -> Response {
    service.with(200, |hook| Ok(hook.status()))
}

/// Lines of the decision log above a number, oldest first.
#[utoipa::path(
    get,
    path = "/v1/decisions",
    params(("above" = Option<u64>, Query)),
    responses((status = 200, description = "Done.", body = Vec<DecisionView>)),
)]
async fn decisions(State(service): Served, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let above = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("above="));
    let above = above.map_or(Ok(0), str::parse::<u64>);
    service.with(200, |hook| match above {
        Ok(above) => Ok(hook.decisions(above)),
        Err(_) => Err(ControlError::new(
            ErrorCode::Invalid,
            "`above` is no number",
        )),
    })
}

/// Where a job of another engine should run; nothing is started or kept.
#[utoipa::path(
    post,
    path = "/v1/decide",
    request_body = DecideRequest,
    responses((status = 200, description = "Done.", body = Decided)),
)]
async fn decide(State(service): Served, Asked(asked): Asked<DecideRequest>) -> Response {
    service.with(200, |hook| hook.decide_for(&asked))
}

/// All jobs.
#[utoipa::path(
    get,
    path = "/v1/jobs",
    responses((status = 200, description = "Done.", body = Vec<JobView>)),
)]
async fn jobs(State(service): Served) -> Response {
    service.with(200, |hook| Ok(hook.job_views()))
}

/// Submits a job.
#[utoipa::path(
    post,
    path = "/v1/jobs",
    request_body = Submission,
    responses(
        (status = 201, description = "Done.", body = JobView),
        (status = 200, description = "It was submitted before, with the same word.", body = JobView),
    ),
)]
async fn submit(State(service): Served, Asked(asked): Asked<Submission>) -> Response {
    let now = service.now();
    let mut new = true;
    let mut response = service.with(201, |hook| {
        let (view, fresh) = hook.submit(asked, now)?;
        new = fresh;
        Ok(view)
    });
    if response.status == 201 && !new {
        response.status = 200;
    }
    response
}

/// One job.
#[utoipa::path(
    get,
    path = "/v1/jobs/{id}",
    params(("id" = u64, Path)),
    responses((status = 200, description = "Done.", body = JobView)),
)]
async fn job(State(service): Served, id: Varies) -> Response {
    service.with(200, |hook| hook.job(id.job()?))
}

/// Takes a job back.
#[utoipa::path(
    delete,
    path = "/v1/jobs/{id}",
    params(("id" = u64, Path)),
    responses((status = 200, description = "Done.", body = JobView)),
)]
async fn cancel(State(service): Served, id: Varies) -> Response {
    let now = service.now();
    service.with(200, |hook| hook.cancel(id.job()?, now))
}

/// Registers a node.
#[utoipa::path(
    put,
    path = "/v1/nodes/{node}",
    params(("node" = String, Path)),
    request_body = Registration,
    responses((status = 200, description = "Done.", body = Welcome)),
)]
async fn register(
    State(service): Served,
    Varies(node): Varies,
    Asked(said): Asked<Registration>,
) -> Response {
    let now = service.now();
    service.with(200, |hook| hook.register(&node, said, now))
}

/// Reports, and takes orders.
#[utoipa::path(
    post,
    path = "/v1/nodes/{node}/report",
    params(("node" = String, Path)),
    request_body = Report,
    responses((status = 200, description = "Done.", body = Orders)),
)]
async fn report(
    State(service): Served,
    Varies(node): Varies,
    Asked(said): Asked<Report>,
) -> Response {
    let now = service.now();
    service.with(200, |hook| hook.report(&node, said, now))
}

/// Gives a node up with all that runs there.
#[utoipa::path(
    delete,
    path = "/v1/nodes/{node}",
    params(("node" = String, Path)),
    responses((status = 200, description = "Done.", body = Object)),
)]
async fn forget(State(service): Served, Varies(node): Varies) -> Response {
    let now = service.now();
    service.with(200, |hook| {
        hook.forget(&node, now).map(|()| serde_json::json!({}))
    })
}

/// Ends the pause of a node that gets no new jobs because some did not start there: the next job
/// tries it.
#[utoipa::path(
    delete,
    path = "/v1/nodes/{node}/pause",
    params(("node" = String, Path)),
    responses((status = 200, description = "Done.", body = NodeView)),
)]
async fn retry(State(service): Served, Varies(node): Varies) -> Response {
    let now = service.now();
    service.with(200, |hook| hook.retry(&node, now))
}

/// Kinds of job that are remembered, each as one of it was submitted last.
#[utoipa::path(
    get,
    path = "/v1/kinds",
    responses((status = 200, description = "Done.", body = Vec<KindView>)),
)]
async fn kinds(State(service): Served) -> Response {
    service.with(200, |hook| Ok(hook.kinds()))
}

/// Takes pairs that were measured elsewhere.
#[utoipa::path(
    post,
    path = "/v1/pairs",
    request_body = Feed,
    responses((status = 200, description = "Done.", body = Fed)),
)]
async fn feed(State(service): Served, Asked(fed): Asked<Feed>) -> Response {
    let now = service.now();
    service.with(200, |hook| hook.feed(fed, now))
}

/// Says which jobs of other engines are to be off the devices, while their engine has them
/// suspended. Those that were named before and are not any more come back.
#[utoipa::path(
    put,
    path = "/v1/away",
    request_body = Away,
    responses((status = 200, description = "Done.", body = Away)),
)]
async fn away(State(service): Served, Asked(away): Asked<Away>) -> Response {
    service.with(200, |hook| hook.keep_away(away))
}
