//! Kinds of values that only the quota file has.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use control::setting::{Form, Kind};
use serde_json::{Value as Json, json};

use super::pattern::Pattern;

/// Texts with `*` and `?`; one, or several with commas between.
#[derive(Debug)]
pub struct Pats;

impl Kind for Pats {
    type Value = Vec<Pattern>;
    const PLACEHOLDER: &'static str = "PATTERN";
    const FORMS: &'static [Form] = &[Form::Text, Form::List];
    const EXAMPLE: &'static str = "\"a*\"";

    fn parse(text: &str) -> Result<Vec<Pattern>, String> {
        let pattern = |text: &str| {
            if text.trim().is_empty() {
                return Err("`\"\"` matches nothing: write a name, or \"*\" for all".into());
            }
            Ok(Pattern::new(text.trim()))
        };
        text.split(',').map(pattern).collect()
    }

    fn schema() -> Json {
        let one = json!({ "type": "string", "minLength": 1 });
        json!({
            "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }],
            "examples": ["train*", ["alice", "bob"]],
        })
    }
}

/// Names or numbers of groups of this host; one, or several with commas between.
#[derive(Debug)]
pub struct Groups;

impl Kind for Groups {
    type Value = Vec<u32>;
    const PLACEHOLDER: &'static str = "GROUP";
    const FORMS: &'static [Form] = &[Form::Text, Form::Number, Form::List];
    const EXAMPLE: &'static str = "\"root\"";

    fn parse(text: &str) -> Result<Vec<u32>, String> {
        let group = |text: &str| {
            let text = text.trim();
            if let Ok(number) = text.parse() {
                return Ok(number);
            }
            if text.is_empty() || text.contains('\0') {
                return Err(format!(
                    "`{}` is no group: write its name or its number",
                    text.escape_debug()
                ));
            }
            match nix::unistd::Group::from_name(text) {
                Ok(Some(group)) => Ok(group.gid.as_raw()),
                Ok(None) => Err(format!(
                    "this host has no group `{text}`: write one of `getent group`, or a number"
                )),
                Err(error) => Err(format!(
                    "whether there is a group `{text}` cannot be asked ({error}): write its number"
                )),
            }
        };
        text.split(',').map(group).collect()
    }

    fn schema() -> Json {
        let one = json!({ "type": ["string", "integer"], "minLength": 1, "minimum": 0 });
        json!({
            "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }],
            "examples": ["users", [100, "video"]],
        })
    }
}

/// `"https://HOST:PORT"`, `"http://HOST:PORT"`
#[derive(Debug)]
pub struct Url;

impl Kind for Url {
    type Value = String;
    const PLACEHOLDER: &'static str = "URL";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"https://hook:7070\"";

    fn parse(text: &str) -> Result<String, String> {
        // TIMEOUT: of requests, of which none is made here.
        cluster::live::http::client::Client::new(text, "", Duration::from_secs(1))
            .map(|_| text.to_owned())
            .map_err(|error| error.to_string())
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": "^https?://.+", "examples": ["https://10.0.0.1:7070", "http://127.0.0.1:7070"] })
    }
}

/// Address and port of this host.
#[derive(Debug)]
pub struct ListenAddress;

impl Kind for ListenAddress {
    type Value = SocketAddr;
    const PLACEHOLDER: &'static str = "ADDRESS:PORT";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"127.0.0.1:7443\"";

    fn parse(text: &str) -> Result<SocketAddr, String> {
        text.parse().map_err(|_| {
            format!(
                "`{text}` is no address with a port: write one such as 10.0.0.7:7443 or [::]:7443"
            )
        })
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": "^.+:[0-9]+$", "examples": ["10.0.0.7:7443", "[::]:7443"] })
    }
}

/// An absolute path.
#[derive(Debug)]
pub struct AbsolutePath;

impl Kind for AbsolutePath {
    type Value = PathBuf;
    const PLACEHOLDER: &'static str = "PATH";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"/etc/sublet/name\"";

    fn parse(text: &str) -> Result<PathBuf, String> {
        let path = PathBuf::from(text);
        if path.is_absolute() {
            return Ok(path);
        }
        Err(format!(
            "`{text}` is no absolute path: write one that begins with /"
        ))
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": "^/" })
    }
}

/// Names of environment variables with commas between.
#[derive(Debug)]
pub struct Variables;

impl Kind for Variables {
    type Value = Vec<String>;
    const PLACEHOLDER: &'static str = "NAME,...";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"A, B_2\"";

    fn parse(text: &str) -> Result<Vec<String>, String> {
        let name = |name: &str| {
            let name = name.trim();
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(format!(
                    "`{}` is no name of a variable: write names with commas between",
                    name.escape_debug()
                ));
            }
            Ok(name.to_owned())
        };
        text.split(',').map(name).collect()
    }

    fn schema() -> Json {
        json!({
            "type": "string",
            "pattern": "^[^=]+$",
            "examples": ["LD_LIBRARY_PATH,NCCL_SOCKET_IFNAME"],
        })
    }
}

/// The name of a node.
#[derive(Debug)]
pub struct NodeName;

impl Kind for NodeName {
    type Value = String;
    const PLACEHOLDER: &'static str = "NAME";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"node-7\"";

    fn parse(text: &str) -> Result<String, String> {
        control::check_name(text)
            .map(|()| text.to_owned())
            .map_err(|error| error.to_string())
    }

    fn schema() -> Json {
        json!({ "type": "string", "minLength": 1, "examples": ["node-7"] })
    }
}

/// Login name or number of one user.
#[derive(Debug)]
pub struct User;

impl Kind for User {
    type Value = String;
    const PLACEHOLDER: &'static str = "USER";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"train\"";

    fn parse(text: &str) -> Result<String, String> {
        if text.trim().is_empty() || text.contains(['\0', '\n', '/']) {
            return Err(format!(
                "`{}` is no login name: write one, or a user's number",
                text.escape_debug()
            ));
        }
        Ok(text.to_owned())
    }

    fn schema() -> Json {
        json!({ "type": "string", "minLength": 1, "examples": ["train"] })
    }
}
