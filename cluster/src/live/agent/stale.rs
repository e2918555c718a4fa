//! Which hook an agent listens to: the newest one of its own cluster.

use std::path::{Path, PathBuf};

use crate::live::wire::HookId;

/// Why an answer of the hook is not listened to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Stale {
    /// Another cluster.
    #[error("this node belongs to cluster {own}, the hook is of cluster {theirs}: give it the right --cluster, or remove {} to move it", .file.display())]
    Cluster {
        /// Ours.
        own: String,
        /// Its.
        theirs: String,
        /// What says so.
        file: PathBuf,
    },
    /// A later one was heard of, or another of the same age.
    #[error(
        "the hook is of epoch {theirs}, and one of epoch {own} was heard before: two hooks run on copies of one state; end the older one"
    )]
    Epoch {
        /// Ours.
        own: u64,
        /// Its.
        theirs: u64,
    },
}

/// Whether to listen to a hook, given the one that was heard before.
pub(super) fn listen_to(own: &HookId, theirs: &HookId, file: &Path) -> Result<(), Stale> {
    if own.cluster.is_empty() || own == theirs {
        return Ok(());
    }
    if own.cluster != theirs.cluster {
        return Err(Stale::Cluster {
            own: own.cluster.clone(),
            theirs: theirs.cluster.clone(),
            file: file.to_owned(),
        });
    }
    if theirs.epoch <= own.epoch {
        return Err(Stale::Epoch {
            own: own.epoch,
            theirs: theirs.epoch,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(cluster: &str, epoch: u64, nonce: &str) -> HookId {
        HookId {
            cluster: cluster.into(),
            epoch,
            nonce: nonce.into(),
        }
    }

    #[test]
    fn only_the_newest_hook_of_the_own_cluster_is_listened_to() {
        let file = Path::new("/run/agent.json");
        let own = id("a", 5, "x");
        let to = |theirs: HookId| listen_to(&own, &theirs, file);
        assert!(
            listen_to(&HookId::default(), &own, file).is_ok(),
            "the first one"
        );
        assert!(to(own.clone()).is_ok() && to(id("a", 6, "y")).is_ok());
        assert_eq!(to(id("a", 4, "z")), Err(Stale::Epoch { own: 5, theirs: 4 }));
        assert_eq!(
            to(id("a", 5, "y")),
            Err(Stale::Epoch { own: 5, theirs: 5 }),
            "a copy that counts alike"
        );
        let error = to(id("b", 9, "x")).unwrap_err().to_string();
        assert!(
            error.contains("cluster a")
                && error.contains("cluster b")
                && error.contains("/run/agent.json"),
            "{error}"
        );
    }
}
