//! Synergy's measurements (OSDI'22): speed by CPU cores and memory for each GPU.

use std::collections::HashMap;
use std::path::Path;

use policy::cluster::fair::Sensitivity;

use super::table::{Table, TraceError};

/// By model and number of GPUs; 1 is the speed with the GPU-proportional part of a server of 24
/// cores, 500 GB and 8 GPUs.
///
/// # Errors
/// [`TraceError`].
pub fn read_sensitivity(file: &Path) -> Result<HashMap<(String, u32), Sensitivity>, TraceError> {
    let table = Table::open(file)?;
    let [model, gpus, cpus, memory, speed] = [
        table.column("model")?,
        table.column("num_gpus")?,
        table.column("cpus_per_gpu")?,
        table.column("mem_gb_per_gpu")?,
        table.column("norm_tput")?,
    ];
    let mut all: HashMap<(String, u32), Sensitivity> = HashMap::new();
    table.each(|row| {
        let of = (row.text(model)?.to_owned(), row.gpus(gpus)?);
        let bytes = 1e9 * row.number(memory)?;
        let at = all.entry(of).or_default();
        at.insert(row.number(cpus)?, bytes, row.number(speed)?);
        Ok(())
    })?;
    Ok(all)
}
