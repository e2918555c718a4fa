//! One call of CRI, by which a kubelet makes containers: `cri SOCKET METHOD JSON` prints the
//! answer as JSON, or ends with 1 and the runtime's message. For `scripts/containerd`.
//!
//! Source: `pkg/apis/runtime/v1/api.proto` of k8s.io/cri-api; only what the script asks for.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use kubernetes::grpc::Client;
use serde_json::{Value, json};

/// TIMEOUT: a runtime on a busy host makes a container within seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Namespaces of the runtime's own.
const NODE: i32 = 2;

macro_rules! messages {
    ($($name:ident { $($(#[$form:meta])* $field:ident: $kind:ty,)* })*) => {$(
        #[derive(Clone, PartialEq, prost::Message)]
        struct $name { $($(#[$form])* $field: $kind,)* }
    )*};
}

messages! {
    Empty {}
    Version {
        #[prost(string, tag = "2")]
        runtime_name: String,
        #[prost(string, tag = "3")]
        runtime_version: String,
    }
    PodMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        uid: String,
        #[prost(string, tag = "3")]
        namespace: String,
    }
    Namespaces {
        #[prost(int32, tag = "1")]
        network: i32,
        #[prost(int32, tag = "2")]
        pid: i32,
    }
    PodSecurity {
        #[prost(message, optional, tag = "1")]
        namespaces: Option<Namespaces>,
    }
    PodLinux {
        #[prost(string, tag = "1")]
        cgroup_parent: String,
        #[prost(message, optional, tag = "2")]
        security: Option<PodSecurity>,
    }
    Pod {
        #[prost(message, optional, tag = "1")]
        metadata: Option<PodMetadata>,
        #[prost(string, tag = "3")]
        log_directory: String,
        #[prost(map = "string, string", tag = "7")]
        annotations: HashMap<String, String>,
        #[prost(message, optional, tag = "8")]
        linux: Option<PodLinux>,
    }
    RunPod {
        #[prost(message, optional, tag = "1")]
        config: Option<Pod>,
    }
    Metadata {
        #[prost(string, tag = "1")]
        name: String,
    }
    Image {
        #[prost(string, tag = "1")]
        image: String,
    }
    Resources {
        #[prost(int64, tag = "1")]
        cpu_period: i64,
        #[prost(int64, tag = "2")]
        cpu_quota: i64,
        #[prost(int64, tag = "3")]
        cpu_shares: i64,
        #[prost(int64, tag = "4")]
        memory_bytes: i64,
    }
    Security {
        #[prost(message, optional, tag = "3")]
        namespaces: Option<Namespaces>,
    }
    Linux {
        #[prost(message, optional, tag = "1")]
        resources: Option<Resources>,
        #[prost(message, optional, tag = "2")]
        security: Option<Security>,
    }
    CdiDevice {
        #[prost(string, tag = "1")]
        name: String,
    }
    Container {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(message, optional, tag = "2")]
        image: Option<Image>,
        #[prost(string, repeated, tag = "3")]
        command: Vec<String>,
        #[prost(string, tag = "11")]
        log_path: String,
        #[prost(message, optional, tag = "15")]
        linux: Option<Linux>,
        #[prost(message, repeated, tag = "17")]
        cdi_devices: Vec<CdiDevice>,
    }
    Create {
        #[prost(string, tag = "1")]
        pod_id: String,
        #[prost(message, optional, tag = "2")]
        config: Option<Container>,
        #[prost(message, optional, tag = "3")]
        pod: Option<Pod>,
    }
    Update {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, optional, tag = "2")]
        linux: Option<Resources>,
    }
    Exec {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(string, repeated, tag = "2")]
        command: Vec<String>,
        #[prost(int64, tag = "3")]
        timeout_s: i64,
    }
    Executed {
        #[prost(bytes = "vec", tag = "1")]
        stdout: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")]
        stderr: Vec<u8>,
        #[prost(int32, tag = "3")]
        exit_code: i32,
    }
    AskStatus {
        #[prost(string, tag = "1")]
        id: String,
    }
    Status {
        #[prost(int32, tag = "3")]
        state: i32,
        #[prost(int32, tag = "7")]
        exit_code: i32,
        #[prost(string, tag = "10")]
        reason: String,
        #[prost(string, tag = "11")]
        message: String,
    }
    Statuses {
        #[prost(message, optional, tag = "1")]
        status: Option<Status>,
    }
    Id {
        #[prost(string, tag = "1")]
        id: String,
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

fn pod(of: &Value) -> Pod {
    let annotations = of["annotations"].as_object().into_iter().flatten();
    Pod {
        metadata: Some(PodMetadata {
            name: text(&of["name"]),
            uid: text(&of["uid"]),
            namespace: "default".into(),
        }),
        log_directory: text(&of["logs"]),
        annotations: annotations
            .map(|(name, value)| (name.clone(), text(value)))
            .collect(),
        linux: Some(PodLinux {
            cgroup_parent: text(&of["cgroup"]),
            security: Some(PodSecurity {
                namespaces: Some(namespaces()),
            }),
        }),
    }
}

/// The network is the runtime's, which has none; processes have their own numbers.
fn namespaces() -> Namespaces {
    Namespaces {
        network: NODE,
        pid: 1,
    }
}

fn resources(of: &Value) -> Resources {
    let number = |name: &str| of[name].as_i64().unwrap_or(0);
    Resources {
        cpu_period: number("cpu_period"),
        cpu_quota: number("cpu_quota"),
        cpu_shares: number("cpu_shares"),
        memory_bytes: number("memory_bytes"),
    }
}

fn container(of: &Value) -> Container {
    let devices = texts(&of["cdi"]).into_iter();
    Container {
        metadata: Some(Metadata {
            name: text(&of["name"]),
        }),
        image: Some(Image {
            image: text(&of["image"]),
        }),
        command: texts(&of["command"]),
        log_path: format!("{}.log", text(&of["name"])),
        linux: Some(Linux {
            resources: Some(resources(&of["resources"])),
            security: Some(Security {
                namespaces: Some(namespaces()),
            }),
        }),
        cdi_devices: devices.map(|name| CdiDevice { name }).collect(),
    }
}

async fn call(socket: &Path, method: &str, of: &Value) -> Result<Value, String> {
    let connected = Client::connect(socket).await;
    let mut client = connected.map_err(|error| error.to_string())?;
    macro_rules! ask {
        ($path:literal, $question:expr) => {{
            let path = concat!("/runtime.v1.RuntimeService/", $path);
            let answer = client.ask(path, $question, PATIENCE).await;
            answer.map_err(|status| status.message().to_owned())?
        }};
    }
    let id = Id {
        id: text(&of["id"]),
    };
    Ok(match method {
        "Version" => {
            let said: Version = ask!("Version", Empty {});
            json!({"name": said.runtime_name, "version": said.runtime_version})
        }
        "RunPodSandbox" => {
            let config = Some(pod(of));
            let made: Id = ask!("RunPodSandbox", RunPod { config });
            json!({"id": made.id})
        }
        "CreateContainer" => {
            let question = Create {
                pod_id: text(&of["pod_id"]),
                config: Some(container(of)),
                pod: Some(pod(&of["pod"])),
            };
            let made: Id = ask!("CreateContainer", question);
            json!({"id": made.id})
        }
        "UpdateContainerResources" => {
            let linux = Some(resources(&of["resources"]));
            let Id { id } = id;
            let _: Empty = ask!("UpdateContainerResources", Update { id, linux });
            json!({})
        }
        "ExecSync" => {
            let question = Exec {
                id: id.id,
                command: texts(&of["command"]),
                timeout_s: 20,
            };
            let done: Executed = ask!("ExecSync", question);
            json!({
                "stdout": String::from_utf8_lossy(&done.stdout),
                "stderr": String::from_utf8_lossy(&done.stderr),
                "exit_code": done.exit_code,
            })
        }
        "ContainerStatus" => {
            let said: Statuses = ask!("ContainerStatus", AskStatus { id: id.id });
            let status = said.status.unwrap_or_default();
            json!({
                "state": status.state, "exit_code": status.exit_code,
                "reason": status.reason, "message": status.message,
            })
        }
        "StartContainer" => {
            let _: Empty = ask!("StartContainer", id);
            json!({})
        }
        "StopContainer" => {
            let _: Empty = ask!("StopContainer", id);
            json!({})
        }
        "RemoveContainer" => {
            let _: Empty = ask!("RemoveContainer", id);
            json!({})
        }
        "StopPodSandbox" => {
            let _: Empty = ask!("StopPodSandbox", id);
            json!({})
        }
        "RemovePodSandbox" => {
            let _: Empty = ask!("RemovePodSandbox", id);
            json!({})
        }
        other => return Err(format!("no method {other}")),
    })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, method, question] = words.as_slice() else {
        eprintln!("cri SOCKET METHOD JSON");
        return ExitCode::from(64);
    };
    let question: Value = match serde_json::from_str(question) {
        Ok(value) => value,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(64);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    match runtime.block_on(call(Path::new(socket), method, &question)) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
