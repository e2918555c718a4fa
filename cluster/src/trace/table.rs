//! A CSV file with a header, whose fields know where they are.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use csv::{ByteRecord, Reader, ReaderBuilder};

use super::clock::{Clock, LONGEST_S};

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {why}", file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system said.
        why: String,
    },
    /// No reader knows such a header.
    #[error("{}:1: no trace has the columns {found}; known are Gavel's (job_type, total_steps, arrival_s, num_gpus), Chronus' (submit_min, duration_min, expect_time_list), ElasticFlow's (cluster, submit_s, duration_s, deadline_s), openb's (num_gpu, gpu_milli, qos, creation_time), Tiresias' (job_id, num_gpu, submit_time, duration), Pollux' (load, workload, submit_s, application, num_gpus), Acme's (gpu_num, submit_time, start_time, end_time), Alibaba's of 2020 (job_name, task_name, inst_num, plan_gpu; or pai_task_table.header beside the file), 2025 (instance_sn, role, gpu_request) and 2026 (gpu_request, worker_num, submit_time, job_type; or pod_id, gpu_request, day, hour), Philly's log (JSON) and plain ones (arrival_s, duration_s, num_gpus)", file.display())]
    Format {
        /// Which file.
        file: PathBuf,
        /// Its header.
        found: String,
    },
    /// A column is missing.
    #[error("{}:1: there is no column `{column}`; the header has {found}", file.display())]
    Column {
        /// Which file.
        file: PathBuf,
        /// Which column.
        column: &'static str,
        /// Its header.
        found: String,
    },
    /// A field is not what it should be.
    #[error("{}:{line}:{column}: {name} is `{value}`; {expected}", file.display())]
    Field {
        /// Which file.
        file: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Column in characters, from 1.
        column: usize,
        /// Name of the column.
        name: &'static str,
        /// What is there.
        value: String,
        /// What should be.
        expected: &'static str,
    },
    /// Something of a log in JSON is not what it should be.
    #[error("{}:{line}:{column}: {why}", file.display())]
    Log {
        /// Which file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// What is wrong, with the value.
        why: String,
    },
    /// A table has no times.
    #[error("{}:1: {why}", file.display())]
    NoTimes {
        /// Which file.
        file: PathBuf,
        /// What to read instead.
        why: &'static str,
    },
    /// A column that is nearly one that is read.
    #[error("{}:1: `{found}` is not a column of a trace; did you mean `{meant}`?", file.display())]
    Misspelt {
        /// Which file.
        file: PathBuf,
        /// What its header says.
        found: String,
        /// What it may mean.
        meant: &'static str,
    },
    /// A line has too few or too many fields.
    #[error("{}:{line}: {found} fields, where the header has {expected}", file.display())]
    Ragged {
        /// Which file.
        file: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Fields there.
        found: usize,
        /// Fields of the header.
        expected: usize,
    },
    /// Nothing is left to simulate.
    #[error("{}: no job{}", file.display(), part.as_ref().map_or(String::new(), |part| format!(" of part `{part}`")))]
    Empty {
        /// Which file.
        file: PathBuf,
        /// What was asked for.
        part: Option<String>,
    },
    /// No request is left to answer.
    #[error("{}: no request", file.display())]
    NoRequest {
        /// Which file.
        file: PathBuf,
    },
    /// Some measurements of an application are missing.
    #[error("{}: application `{name}` has no placement or no epoch measured", file.display())]
    Unmeasured {
        /// Which file.
        file: PathBuf,
        /// Which application.
        name: String,
    },
    /// A speed table says nothing about a GPU type.
    #[error("{}: no speeds for GPU type `{kind}`; known are {known}", file.display())]
    GpuType {
        /// Which file.
        file: PathBuf,
        /// What was asked for.
        kind: String,
        /// What the table has.
        known: String,
    },
}

/// Longest header that is in a file of its own, in bytes.
const MOST_HEADER: u64 = 1 << 16;

/// An open file, read line by line.
pub struct Table {
    file: PathBuf,
    header: Vec<String>,
    reader: Reader<File>,
}

/// A column, looked up once.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    index: usize,
    name: &'static str,
}

/// One line.
pub struct Row<'a> {
    table: &'a Path,
    record: &'a ByteRecord,
    line: u64,
}

impl Table {
    pub fn open(file: &Path) -> Result<Self, TraceError> {
        let io = |why: String| TraceError::Io {
            file: file.to_owned(),
            why,
        };
        let opened = File::open(file).map_err(|error| io(error.to_string()))?;
        let mut reader = ReaderBuilder::new().flexible(true).from_reader(opened);
        let header = reader
            .byte_headers()
            .map_err(|error| io(error.to_string()))?
            .iter()
            .map(|name| String::from_utf8_lossy(name).trim().to_owned())
            .collect();
        Ok(Self {
            file: file.to_owned(),
            header,
            reader,
        })
    }

    /// A table whose header is the only line of another file, as Alibaba's of 2020 have it. A
    /// table that has it as its first line too is as good.
    pub fn with_header(file: &Path, header: &Path) -> Result<Self, TraceError> {
        let io = |file: &Path, why: std::io::Error| TraceError::Io {
            file: file.to_owned(),
            why: why.to_string(),
        };
        let mut text = String::new();
        let opened = File::open(header).map_err(|error| io(header, error))?;
        opened
            .take(MOST_HEADER)
            .read_to_string(&mut text)
            .map_err(|error| io(header, error))?;
        let names = text.lines().next().unwrap_or_default();
        let names: Vec<String> = names
            .split(',')
            .map(|name| name.trim().to_owned())
            .collect();
        let opened = File::open(file).map_err(|error| io(file, error))?;
        let mut builder = ReaderBuilder::new();
        let builder = builder.flexible(true).has_headers(false);
        let mut table = Self {
            file: file.to_owned(),
            header: names,
            reader: builder.from_reader(opened),
        };
        let mut first = ByteRecord::new();
        let start = table.reader.position().clone();
        let read = table.reader.read_byte_record(&mut first);
        read.map_err(|error| io(file, std::io::Error::other(error)))?;
        let repeated = first.len() == table.header.len()
            && first
                .iter()
                .zip(&table.header)
                .all(|(a, b)| a == b.as_bytes());
        if !repeated {
            let back = table.reader.seek(start);
            back.map_err(|error| io(file, std::io::Error::other(error)))?;
        }
        Ok(table)
    }

    /// Columns that are not among these, as the header has them.
    ///
    /// # Errors
    /// [`TraceError::Misspelt`]: one is nearly one of these that the table lacks.
    pub fn others(&self, known: &[&'static str]) -> Result<Vec<String>, TraceError> {
        let others = self.header.iter().filter(|name| {
            // An index that a program wrote has no name.
            !name.is_empty() && !known.contains(&name.as_str())
        });
        let others: Vec<String> = others.cloned().collect();
        let missing = || known.iter().copied().filter(|name| !self.has(name));
        for found in &others {
            if let Some(meant) = policy::names::nearest(found, missing()) {
                return Err(TraceError::Misspelt {
                    file: self.file.clone(),
                    found: found.clone(),
                    meant,
                });
            }
        }
        Ok(others)
    }

    pub fn has(&self, column: &str) -> bool {
        self.header.iter().any(|name| name == column)
    }

    pub fn column(&self, name: &'static str) -> Result<Column, TraceError> {
        match self.header.iter().position(|column| column == name) {
            Some(index) => Ok(Column { index, name }),
            None => Err(TraceError::Column {
                file: self.file.clone(),
                column: name,
                found: self.header.join(", "),
            }),
        }
    }

    pub fn optional(&self, name: &'static str) -> Option<Column> {
        self.column(name).ok()
    }

    pub fn unknown_format(&self) -> TraceError {
        TraceError::Format {
            file: self.file.clone(),
            found: self.header.join(", "),
        }
    }

    /// Every line in turn.
    pub fn each(
        mut self,
        mut visit: impl FnMut(&Row<'_>) -> Result<(), TraceError>,
    ) -> Result<(), TraceError> {
        let mut record = ByteRecord::new();
        loop {
            let more = self.reader.read_byte_record(&mut record);
            let more = more.map_err(|error| TraceError::Io {
                file: self.file.clone(),
                why: error.to_string(),
            })?;
            if !more {
                return Ok(());
            }
            let line = record.position().map_or(0, csv::Position::line);
            if record.len() != self.header.len() {
                return Err(TraceError::Ragged {
                    file: self.file,
                    line,
                    found: record.len(),
                    expected: self.header.len(),
                });
            }
            visit(&Row {
                table: &self.file,
                record: &record,
                line,
            })?;
        }
    }
}

impl Row<'_> {
    pub fn text(&self, column: Column) -> Result<&str, TraceError> {
        let bytes = &self.record[column.index];
        std::str::from_utf8(bytes).map_err(|_| self.wrong(column, "that is not UTF-8"))
    }

    /// The field is wrong: where it is, and what should be there.
    pub fn wrong(&self, column: Column, expected: &'static str) -> TraceError {
        let before = self.record.iter().take(column.index);
        let character = 1 + before.map(|field| field.len() + 1).sum::<usize>();
        TraceError::Field {
            file: self.table.to_owned(),
            line: self.line,
            column: character,
            name: column.name,
            value: String::from_utf8_lossy(&self.record[column.index])
                .chars()
                .take(40)
                .collect(),
            expected,
        }
    }

    fn parse<T: FromStr>(&self, column: Column, expected: &'static str) -> Result<T, TraceError> {
        let text = self.text(column)?.trim();
        text.parse().map_err(|_| self.wrong(column, expected))
    }

    /// A finite number of at least 0.
    pub fn number(&self, column: Column) -> Result<f64, TraceError> {
        const EXPECTED: &str = "a number of at least 0 is expected";
        let number: f64 = self.parse(column, EXPECTED)?;
        if number.is_finite() && number >= 0.0 {
            Ok(number)
        } else {
            Err(self.wrong(column, EXPECTED))
        }
    }

    /// Seconds from 0 to 100 years.
    pub fn seconds(&self, column: Column) -> Result<f64, TraceError> {
        match self.number(column)? {
            seconds if seconds <= LONGEST_S => Ok(seconds),
            _ => Err(self.wrong(column, "seconds from 0 to 3.2e9 (100 years) are expected")),
        }
    }

    /// The same where nothing, or that it is not a number, says that it is not known.
    pub fn known_seconds(&self, column: Column) -> Result<Option<f64>, TraceError> {
        let text = self.text(column)?.trim();
        let nothing = text.is_empty() || text.eq_ignore_ascii_case("nan");
        if nothing {
            return Ok(None);
        }
        self.seconds(column).map(Some)
    }

    /// Seconds or a calendar time.
    pub fn time(&self, column: Column, clock: &mut Clock) -> Result<f64, TraceError> {
        let read = clock.read(self.text(column)?);
        read.map_err(|expected| self.wrong(column, expected))
    }

    /// A calendar time.
    pub fn calendar(&self, column: Column, clock: &mut Clock) -> Result<f64, TraceError> {
        let read = clock.calendar(self.text(column)?);
        read.map_err(|expected| self.wrong(column, expected))
    }

    /// GPUs for each of some instances, whole or a part of one, in so many parts of a GPU: 0 to
    /// 65,536.
    pub fn gpu_parts(&self, column: Column, whole: f64) -> Result<f64, TraceError> {
        let gpus = self.number(column)? / whole;
        if gpus > 65_536.0 {
            return Err(self.wrong(column, "at most 65536 GPUs are expected"));
        }
        Ok(gpus)
    }

    /// A number of GPUs, 1 to 65,536.
    pub fn gpus(&self, column: Column) -> Result<u32, TraceError> {
        const EXPECTED: &str = "a number of GPUs from 1 to 65536 is expected";
        let gpus: u32 = self.parse(column, EXPECTED)?;
        if (1..=65_536).contains(&gpus) {
            Ok(gpus)
        } else {
            Err(self.wrong(column, EXPECTED))
        }
    }

    /// Whether a field is empty.
    pub fn is_empty(&self, column: Column) -> bool {
        self.record[column.index].is_empty()
    }
}
