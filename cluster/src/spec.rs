//! What a cluster consists of: `96xV100`, `16x4xT4` (nodes x GPUs x type), several by comma, or a
//! file in Tiresias' or openb's format.

use std::path::Path;
use std::str::FromStr;

use policy::cluster::{ClusterState, GpuId, GpuType, Node};

/// Most GPUs that a simulated cluster may have.
const MOST_GPUS: u64 = 1_000_000;

/// Nodes and the names of their GPU types.
#[derive(Clone, PartialEq, Debug)]
pub struct ClusterSpec {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Names of the GPU types, in small letters, by [`GpuType`].
    pub gpu_types: Vec<String>,
}

/// Why there is no such cluster.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// A part is not understood.
    #[error(
        "cluster part `{part}`: {why}; write 96xV100 (GPUs x type), 16x4xT4 (nodes x GPUs x type), several by comma, or name a file"
    )]
    Part {
        /// Which.
        part: String,
        /// Why.
        why: &'static str,
    },
    /// The file is not understood.
    #[error("{file}:{line}: {why}")]
    File {
        /// Which.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Why.
        why: String,
    },
}

impl FromStr for ClusterSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut spec = Self {
            nodes: Vec::new(),
            gpu_types: Vec::new(),
        };
        for part in text.split(',') {
            let wrong = |why| SpecError::Part {
                part: part.to_owned(),
                why,
            };
            // Numbers first; what is left names the type, which may have an `x` of its own.
            let mut words: Vec<&str> = Vec::new();
            let mut left = part.trim();
            while let Some((number, rest)) = left.split_once('x')
                && number.parse::<u64>().is_ok()
            {
                words.push(number);
                left = rest;
            }
            let mut kind = "gpu".to_owned();
            match left.parse::<u64>() {
                Ok(_) => words.push(left),
                Err(_) => kind = left.to_lowercase(),
            }
            if words.is_empty() {
                return Err(wrong("that is not a number of GPUs"));
            }
            if kind.is_empty() || !kind.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
                return Err(wrong("the type of a GPU is letters and digits"));
            }
            let numbers: Vec<u64> = words
                .iter()
                .map(|word| {
                    word.parse()
                        .map_err(|_| wrong("that is not a number of GPUs"))
                })
                .collect::<Result<_, _>>()?;
            let (nodes, per_node) = match numbers[..] {
                [0] | [0, _] | [_, 0] => return Err(wrong("a cluster has at least one GPU")),
                [gpus] => (gpus.div_ceil(8), 8.min(gpus)),
                [nodes, per_node] => (nodes, per_node),
                _ => return Err(wrong("one or two numbers are expected before the type")),
            };
            if per_node > 64 {
                return Err(wrong("a node has at most 64 GPUs"));
            }
            if nodes.saturating_mul(per_node) > MOST_GPUS {
                return Err(wrong("at most a million GPUs"));
            }
            // `96xV100` is as many GPUs as it says: the last node may be narrower.
            let mut left = if numbers.len() == 1 {
                numbers[0]
            } else {
                nodes * per_node
            };
            while left > 0 {
                let gpus = left.min(per_node);
                spec.add(gpus as u32, &kind, 3.0 * gpus as f64, gpus * 62_500_000_000);
                left -= gpus;
            }
        }
        Ok(spec)
    }
}

impl ClusterSpec {
    /// From what stands on the command line: the name of a file that exists, or a description.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        if !Path::new(text).is_file() {
            return text.parse();
        }
        let wrong = |line, why| SpecError::File {
            file: text.to_owned(),
            line,
            why,
        };
        let lines = std::fs::read_to_string(text).map_err(|error| wrong(1, error.to_string()))?;
        let mut lines = lines.lines().enumerate();
        let header: Vec<&str> = lines
            .next()
            .map_or(Vec::new(), |(_, line)| line.split(',').collect());
        let at = |name| header.iter().position(|column| *column == name);
        let mut spec = Self {
            nodes: Vec::new(),
            gpu_types: Vec::new(),
        };
        let openb = at("gpu").zip(at("model"));
        let tiresias = at("num_switch")
            .zip(at("num_node_p_switch"))
            .zip(at("num_gpu_p_node"));
        for (index, line) in lines {
            let fields: Vec<&str> = line.split(',').collect();
            let number = |column: Option<usize>| {
                let field = column.and_then(|column| fields.get(column)).unwrap_or(&"");
                field
                    .trim()
                    .parse::<u64>()
                    .ok()
                    .filter(|number| *number <= MOST_GPUS)
                    .ok_or_else(|| {
                        wrong(
                            index + 1,
                            format!("`{field}` is not a number up to {MOST_GPUS}"),
                        )
                    })
            };
            if let Some((gpus, model)) = openb {
                let count = number(Some(gpus))?;
                if count == 0 || count > 64 {
                    return Err(wrong(
                        index + 1,
                        format!("a node has 1 to 64 GPUs, not {count}"),
                    ));
                }
                let name = fields.get(model).unwrap_or(&"gpu").to_lowercase();
                let field = |name| at(name).and_then(|at| fields.get(at)?.parse().ok());
                let cpus =
                    field("cpu_milli").map_or(3.0 * count as f64, |milli: f64| milli / 1000.0);
                let bytes = field("memory_mib").map_or(0, |mib: f64| mib as u64) << 20;
                spec.add(count as u32, &name, cpus, bytes);
            } else if let Some(((switches, nodes), gpus)) = tiresias {
                let (switches, nodes, gpus) = (
                    number(Some(switches))?,
                    number(Some(nodes))?,
                    number(Some(gpus))?,
                );
                let all = switches.saturating_mul(nodes).saturating_mul(gpus);
                if gpus == 0 || gpus > 64 || all == 0 || all > MOST_GPUS {
                    return Err(wrong(
                        index + 1,
                        "1 to 64 GPUs on a node, up to a million in all".into(),
                    ));
                }
                let cpus = number(at("num_cpu_p_node"))? as f64;
                for _ in 0..switches * nodes {
                    spec.add(gpus as u32, "gpu", cpus, 0);
                }
            } else {
                return Err(wrong(1, "neither Tiresias' columns (num_switch, num_node_p_switch, num_gpu_p_node) nor openb's (gpu, model)".into()));
            }
        }
        if spec.nodes.is_empty() {
            return Err(wrong(1, "no node".into()));
        }
        Ok(spec)
    }

    fn add(&mut self, gpus: u32, kind: &str, cpus: f64, mem_bytes: u64) {
        let known = self.gpu_types.iter().position(|name| name == kind);
        let number = known.unwrap_or_else(|| {
            self.gpu_types.push(kind.to_owned());
            self.gpu_types.len() - 1
        });
        self.nodes.push(Node {
            first: GpuId(0),
            gpus,
            kind: GpuType(number as u16),
            gpu_bytes: gpu_bytes(kind),
            cpus,
            mem_bytes,
        });
    }

    /// Number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.nodes.iter().map(|node| node.gpus).sum()
    }

    /// An empty cluster of this kind.
    #[must_use]
    pub fn state(&self) -> ClusterState {
        ClusterState::new(self.nodes.clone())
    }
}

/// Memory of a GPU by the name of its type; 16 GiB where we do not know it.
fn gpu_bytes(kind: &str) -> u64 {
    let gib = match kind.strip_suffix("-simulated").unwrap_or(kind) {
        "k80" => 12,
        "h200" => 141,
        "a100" => 40,
        "a100-80" | "h100" => 80,
        "v100m32" => 32,
        "g2" | "a10" => 24,
        "2080ti" => 11,
        _ => 16,
    };
    gib << 30
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_gpu_has_the_memory_of_the_real_one() {
        for kind in ["h200", "h100", "k80", "2080ti"] {
            assert_eq!(gpu_bytes(&format!("{kind}-simulated")), gpu_bytes(kind));
        }
        assert_eq!(gpu_bytes("h200-simulated"), 141 << 30);
    }

    #[test]
    fn descriptions_are_read() {
        let spec: ClusterSpec = "12xV100,2x4xT4".parse().unwrap();
        assert_eq!(spec.gpus(), 20);
        let widths: Vec<u32> = spec.nodes.iter().map(|node| node.gpus).collect();
        assert_eq!(widths, [8, 4, 4, 4]);
        assert_eq!(spec.gpu_types, ["v100", "t4"]);
        let spec: ClusterSpec = "4xRTX-4090,2x8xRTX".parse().unwrap();
        assert_eq!(
            (spec.gpus(), &spec.gpu_types[..]),
            (20, &["rtx-4090".to_owned(), "rtx".to_owned()][..])
        );
        assert_eq!("7".parse::<ClusterSpec>().unwrap().gpus(), 7);
    }

    #[test]
    fn impossible_clusters_are_refused() {
        for (text, word) in [
            ("0xV100", "at least one"),
            ("4x0xV100", "at least one"),
            ("2x128xV100", "at most 64"),
            ("1x2x3xV100", "one or two"),
            ("axV100", "not a number"),
            ("99999999999", "million"),
            ("8xV 100", "letters"),
            ("", "`"),
        ] {
            let error = text.parse::<ClusterSpec>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
