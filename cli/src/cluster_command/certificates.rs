//! `sublet cluster certificates` and `node-token`: what hook and nodes know each other by.

use std::fmt::Write as _;
use std::time::SystemTime;

use anyhow::{anyhow, bail};
use certificates::{Lab, Purpose};
use cluster::live::auth::{Secret, Token};
use cluster::live::service;

use super::args::{Certificates, NodeToken};

/// What operators' certificates are for, where the hook has no --operator.
pub const OPERATOR: &str = "operator";

/// One to be made.
struct Wanted {
    /// Names of the files, without their ends.
    file: String,
    names: Vec<String>,
    purpose: Purpose,
    /// For whom, and by which flags.
    used: String,
}

pub fn make(args: &Certificates) -> anyhow::Result<String> {
    let makes = !args.hook.is_empty() || !args.node.is_empty() || args.operator;
    if !makes && args.revoke.is_empty() {
        bail!("whom for? give --hook HOST, --node NODE or --operator, or --revoke NAME");
    }
    if !args.revoke.is_empty() && !args.dir.join("ca.crt").exists() {
        bail!(
            "{} has no ca.crt, so there is nothing to revoke",
            args.dir.display()
        );
    }
    let wanted = wanted(args)?;
    for one in &wanted {
        certificates::check_names(&one.names)?;
    }
    let now = SystemTime::now();
    let lab = Lab::open(&args.dir, now)?;
    // All or none: what is there is reported before anything is made.
    if !args.renew {
        for one in &wanted {
            let (certificate, key) = lab.files(&one.file);
            if let Some(there) = [certificate, key].into_iter().find(|file| file.exists()) {
                bail!(
                    "{} is there: --renew puts a new one in its place",
                    there.display()
                );
            }
        }
    }
    let mut text = String::new();
    // Before new ones are made: those stay good.
    if !args.revoke.is_empty() {
        let (counts, file) = lab.revoke(&args.revoke, now)?;
        for (who, count) in args.revoke.iter().zip(counts) {
            let _ = match count {
                0 => writeln!(text, "{who}: has no certificate that is good any more"),
                count => writeln!(text, "{who}: certificates revoked: {count}"),
            };
        }
        let _ = writeln!(
            text,
            "{}: put it in the place of the one before on every host",
            file.display()
        );
    }
    if lab.is_new {
        let (certificate, key) = lab.files("ca");
        let _ = writeln!(
            text,
            "{}: believe it on every host; {}: keep it where you make certificates",
            certificate.display(),
            key.display()
        );
    }
    for one in &wanted {
        let span = (now, args.days);
        let (certificate, _) = lab.make(&one.file, &one.names, one.purpose, span, args.renew)?;
        let _ = writeln!(
            text,
            "{} and its .key, {} days: {}",
            certificate.display(),
            args.days,
            one.used
        );
    }
    Ok(text)
}

fn wanted(args: &Certificates) -> anyhow::Result<Vec<Wanted>> {
    let mut all = Vec::new();
    if !args.hook.is_empty() {
        all.push(Wanted {
            file: "hook".into(),
            names: args.hook.clone(),
            purpose: Purpose::Server,
            used: format!(
                "the hook at {} (--tls-cert, --tls-key)",
                args.hook.join(", ")
            ),
        });
    }
    if args.operator {
        all.push(Wanted {
            file: OPERATOR.into(),
            names: vec![OPERATOR.into()],
            purpose: Purpose::Client,
            used: "users of `sublet cluster` (--cert-file, --key-file)".into(),
        });
    }
    for node in &args.node {
        control::check_name(node)
            .map_err(|_| anyhow!("`{node}` is no name of a node: letters, digits, `-`, `.`"))?;
        if node == OPERATOR {
            bail!("`{OPERATOR}` is what operators are called: call the node something else");
        }
        let file = format!("node-{node}");
        if all.iter().any(|one| one.file == file) {
            bail!("node `{node}` is named twice");
        }
        all.push(Wanted {
            file,
            names: vec![node.clone()],
            purpose: Purpose::Client,
            used: format!("node {node} (--cluster-cert, --cluster-key)"),
        });
    }
    Ok(all)
}

pub fn node_token(args: &NodeToken) -> anyhow::Result<String> {
    control::check_name(&args.node).map_err(|_| anyhow!("`{}` is no name of a node", args.node))?;
    let token = service::read_token(&args.token_file)?;
    if Token::new(&token).node().is_some() {
        bail!(
            "{} has the token of a node: give the hook's own",
            args.token_file.display()
        );
    }
    Ok(format!(
        "{}\n",
        Secret::new(&token).token_of_node(&args.node)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_certificate_can_have_leaves_nothing_behind() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("lab");
        let args = Certificates {
            dir: dir.clone(),
            hook: vec!["head".into(), "a*b".into()],
            node: Vec::new(),
            operator: false,
            days: 1,
            renew: false,
            revoke: Vec::new(),
        };
        let error = make(&args).unwrap_err().to_string();
        assert!(error.contains("`a*b`") && !dir.exists(), "{error}");
    }

    #[test]
    fn who_has_had_none_is_not_revoked_and_all_that_somebody_had_are() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("lab");
        let args = |node: &[&str], revoke: &[&str], renew| Certificates {
            dir: dir.clone(),
            hook: Vec::new(),
            node: node.iter().map(ToString::to_string).collect(),
            operator: false,
            days: 1,
            renew,
            revoke: revoke.iter().map(ToString::to_string).collect(),
        };
        let error = make(&args(&[], &["node-a"], false))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("nothing to revoke") && !dir.exists(),
            "{error}"
        );
        make(&args(&["a", "b"], &[], false)).unwrap();
        make(&args(&["a"], &[], true)).unwrap();
        let before = std::fs::read(dir.join("ca.crt")).unwrap();
        let error = make(&args(&[], &["node-a", "a"], false))
            .unwrap_err()
            .to_string();
        assert!(error.contains("`a` has no certificate here"), "{error}");
        assert_eq!(std::fs::read(dir.join("ca.crt")).unwrap(), before);
        let said = make(&args(&["a"], &["node-a"], true)).unwrap();
        assert!(said.contains("node-a: certificates revoked: 2\n"), "{said}");
        let said = make(&args(&[], &["node-a", "node-a"], false)).unwrap();
        assert!(
            said.contains("revoked: 1\nnode-a: has no certificate"),
            "{said}"
        );
        // What is revoked is not brought back by a lab that has lost what it knew.
        std::fs::remove_file(dir.join("issued.txt")).unwrap();
        let error = make(&args(&["c"], &[], false)).unwrap_err().to_string();
        assert!(
            error.contains("issued.txt") && error.contains("put the file back"),
            "{error}"
        );
        assert!(!dir.join("node-c.crt").exists());
    }
}
