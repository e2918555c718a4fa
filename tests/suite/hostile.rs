//! Jobs that harm the others, and jobs on several devices: nobody else stands still.

use std::time::{Duration, Instant};

use control::JobStatus;
use nix::sys::signal::Signal;
use tests::{Artefacts, Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

fn spin(sandbox: &Sandbox, name: &str, fault: Option<&str>) -> Running {
    let mut command = sandbox.job(
        &["--name", name, "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    command.args(["--kernel-us", "200", "--seconds", "600"]);
    if let Some(fault) = fault {
        command.env("SUBLET_SIM_FAULT", fault);
    }
    Running::start(&mut command)
}

fn spin_of(sandbox: &Sandbox, name: &str, share: &str) -> Running {
    let program = Artefacts::get().program("spin");
    let mut command = sandbox.job(&["--name", name, "--share", share], program);
    Running::start(command.args(["--kernel-us", "200", "--seconds", "600"]))
}

fn job(sandbox: &Sandbox, name: &str) -> JobStatus {
    sandbox.job_status(name).unwrap_or_default()
}

fn goes_on(sandbox: &Sandbox, name: &str) {
    let before = job(sandbox, name).launches;
    wait_until("it goes on", || {
        (job(sandbox, name).launches > before + 200).then_some(())
    });
}

#[test]
fn a_kernel_that_never_ends_is_reported_and_costs_the_others_no_more_than_its_part() {
    let sandbox = Sandbox::exclusive();
    let honest = spin(&sandbox, "honest", None);
    goes_on(&sandbox, "honest");
    let mut endless = spin(&sandbox, "endless", Some("endless:kernel=sublet_busy_us"));
    let reported = wait_until("it is reported", || {
        sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "misbehaviour")
    });
    assert_eq!(
        (reported.job.as_str(), &reported.fields["violation"]),
        ("endless", &"endless".into())
    );
    goes_on(&sandbox, "honest");
    let ps = Outcome::of(&mut sandbox.sublet(["ps"])).succeeded();
    assert!(
        ps.stdout
            .contains("endless runs after all others: it still has work"),
        "{ps:?}"
    );
    assert!(!endless.has_ended(), "nobody asked to have it ended");
    // In slices: while it is demoted it is not let in, and the honest one has what the kernel
    // leaves.
    let begun = [job(&sandbox, "honest"), job(&sandbox, "endless")];
    let (mut looks, mut let_in) = (0, 0);
    for _ in 0..12 {
        let before = job(&sandbox, "endless");
        goes_on(&sandbox, "honest");
        let after = job(&sandbox, "endless");
        // It may try again after its penalty, which is over now and then.
        if before.demoted.is_some() && after.demoted.is_some() {
            looks += 1;
            let_in += after.grants - before.grants;
        }
    }
    let had = |name: &str, at: usize| job(&sandbox, name).device_time_ns - begun[at].device_time_ns;
    let (honest_ns, endless_ns) = (had("honest", 0), had("endless", 1));
    println!(
        "now: let in {let_in} times in {looks} looks while demoted; {honest_ns} ns of the device for \
         the honest one, {endless_ns} ns for the endless one"
    );
    assert!(
        looks > 0 && let_in <= 1,
        "let in {let_in} times in {looks} looks"
    );
    // Its kernel takes turns with what the honest one has there.
    assert!(honest_ns * 10 >= endless_ns * 8, "{honest_ns} {endless_ns}");
    assert_eq!(job(&sandbox, "honest").demoted, None);
    drop((honest, endless));
}

#[test]
fn a_stopped_job_is_reported_costs_the_others_next_to_nothing_and_goes_on_where_it_was() {
    let sandbox = Sandbox::exclusive();
    let honest = spin(&sandbox, "honest", None);
    let stopped = spin(&sandbox, "stopped", None);
    goes_on(&sandbox, "honest");
    goes_on(&sandbox, "stopped");
    // Stopped while it holds the device, or while its work is on it.
    let holds = |name: &str| {
        let devices = sandbox.control().and_then(|mut control| {
            let status = control.status();
            status.map_err(|error| error.to_string())
        });
        let holder = devices
            .ok()
            .and_then(|status| status.devices.first()?.holder.clone());
        holder.as_deref() == Some(name)
    };
    // Between two launches it wants nothing, and being stopped is no violation: then once more.
    let reported = wait_until("it is reported", || {
        stopped.signal(Signal::SIGCONT);
        wait_until("it holds the device", || holds("stopped").then_some(()));
        stopped.signal(Signal::SIGSTOP);
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(3) {
            let mut events = sandbox.events().into_iter();
            if let Some(event) = events.find(|event| event.kind == "misbehaviour") {
                return Some(event);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    });
    goes_on(&sandbox, "honest");
    let violation = reported.fields["violation"].as_str().expect("a word");
    assert_eq!(reported.job, "stopped");
    assert!(
        matches!(violation, "unresponsive" | "endless"),
        "{violation}"
    );
    assert!(job(&sandbox, "stopped").demoted.is_some());
    // From here on it has the device at most for a slice now and then, to see whether it is back.
    let before = [job(&sandbox, "honest"), job(&sandbox, "stopped")];
    goes_on(&sandbox, "honest");
    goes_on(&sandbox, "honest");
    let grants = [job(&sandbox, "honest"), job(&sandbox, "stopped")]
        .iter()
        .zip(&before)
        .map(|(now, then)| now.grants - then.grants)
        .collect::<Vec<_>>();
    assert!(grants[1] <= grants[0] + 1, "{grants:?}");
    // What it cost the other one, by the arbiter's account: to wait for a slice each time, with its
    // kernel and the time for which it is waited for; never more than the longest slice that there
    // is.
    let waited_ns = job(&sandbox, "honest").wait_time_ns - before[0].wait_time_ns;
    let most_ns = (grants[1] + 1) * 52_000_000;
    assert!(
        waited_ns <= most_ns,
        "{waited_ns} ns for {} slices",
        grants[1]
    );
    assert_eq!(job(&sandbox, "honest").demoted, None);
    stopped.signal(Signal::SIGCONT);
    goes_on(&sandbox, "stopped");
    wait_until("it is forgiven", || {
        job(&sandbox, "stopped").demoted.is_none().then_some(())
    });
    drop((honest, stopped));
}

/// Sixteen programs that compute and give way to everybody else. They end with the thread that has
/// started them, also where that is killed.
struct Load(Vec<std::process::Child>);

impl Load {
    fn start() -> Self {
        let start = |_| {
            let mut command = std::process::Command::new("nice");
            command.args(["-n", "10", "setpriv", "--pdeathsig", "KILL"]);
            command.args(["sh", "-c", "while :; do :; done"]);
            command.spawn().expect("started")
        };
        Self((0..16).map(start).collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn jobs_on_an_overloaded_host_are_not_taken_for_offenders() {
    let sandbox = Sandbox::exclusive();
    let load = Load::start();
    let jobs = ["a", "b", "c"].map(|name| spin_of(&sandbox, name, "0.3"));
    for _ in 0..4 {
        for name in ["a", "b", "c"] {
            goes_on(&sandbox, name);
        }
    }
    let violations: Vec<_> = sandbox
        .events()
        .into_iter()
        .filter(|event| event.kind == "misbehaviour")
        .collect();
    assert!(violations.is_empty(), "{violations:?}");
    println!(
        "now: {} jobs demoted under {} niced programs",
        violations.len(),
        load.0.len()
    );
    drop((jobs, load));
}

#[test]
fn tiny_memsets_beside_a_busy_job_are_no_violation() {
    let sandbox = Sandbox::exclusive();
    let busy = spin_of(&sandbox, "busy", "0.5");
    goes_on(&sandbox, "busy");
    let flags = ["--name", "tiny", "--share", "0.5"];
    let mut tiny = ProgramRun::start(&mut sandbox.job(&flags, programs::program("lease")));
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    assert_eq!(tiny.ask(&format!("init {}", kernels.display())), "0");
    let mut rounds = 0;
    wait_until("it has had the device for more than a second", || {
        rounds += 1;
        assert_eq!(tiny.ask("memsets 20000"), "0");
        (job(&sandbox, "tiny").device_time_ns > 1_500_000_000).then_some(())
    });
    goes_on(&sandbox, "busy");
    let events = sandbox.events();
    let violations: Vec<_> = events.iter().filter(|e| e.kind == "misbehaviour").collect();
    assert!(violations.is_empty(), "{violations:?}");
    println!("now: {rounds} times 20,000 memsets of 4 KiB beside a busy job, 0 violations");
    tiny.finish().succeeded();
    drop(busy);
}

#[test]
fn a_job_that_is_refused_memory_without_end_keeps_its_share() {
    let sandbox = Sandbox::exclusive();
    let busy = spin_of(&sandbox, "busy", "0.5");
    goes_on(&sandbox, "busy");
    let mut command = sandbox.job(
        &["--name", "full", "--share", "0.5", "--mem", "512MiB"],
        programs::program("at_quota"),
    );
    let kernel = Artefacts::get().root().join("simgpu/kernels/busy.ptx");
    let mut full = ProgramRun::start(command.arg(kernel).arg((1u64 << 30).to_string()));
    let mut answer = || {
        let line = full.ask("refused");
        let mut words = line.split(' ').map(|word| word.parse::<u64>());
        let mut next = || words.next().and_then(Result::ok).expect("a number");
        (next(), next())
    };
    // Far longer than the five periods of 0.1 s after which a flood is found.
    let (refused, wrong) = wait_until("it was refused often and has computed", || {
        let counted = answer();
        let now = job(&sandbox, "full");
        assert_eq!(now.demoted, None, "after {} refusals", counted.0);
        let device_ns = now.device_time_ns;
        (counted.0 > 20_000 && device_ns > 500_000_000).then_some(counted)
    });
    assert_eq!(wrong, 0);
    let (full_job, events) = (job(&sandbox, "full"), sandbox.events());
    let found = events.iter().filter(|event| event.kind == "misbehaviour");
    let share = full_job.share_got_contended.expect("contended");
    println!(
        "now: {refused} refusals, {} violations, {share:.3} of the device for 0.5",
        full_job.misbehaved_count
    );
    assert_eq!(found.count(), 0, "{events:?}");
    assert_eq!((full_job.misbehaved_count, &full_job.demoted), (0, &None));
    assert!(full_job.oom_count > 0, "the journal knows");
    full.finish().succeeded();
    drop(busy);
}

#[test]
fn a_job_with_a_sticky_error_leaves_its_turns_to_the_others() {
    let sandbox = Sandbox::exclusive();
    let honest = spin(&sandbox, "honest", None);
    goes_on(&sandbox, "honest");
    let broken = spin(
        &sandbox,
        "broken",
        Some("sticky:kernel=sublet_busy_us,status=719"),
    );
    let outcome = broken.wait();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    goes_on(&sandbox, "honest");
    wait_until("the other one has the device to itself", || {
        (job(&sandbox, "honest").share_got_recent > 0.8).then_some(())
    });
    drop(honest);
}

#[test]
fn a_job_on_two_devices_is_a_gang_until_it_is_set_otherwise() {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_DEVICES", "2");
    let spin = Artefacts::get().program("spin");
    let script = format!(
        "{0} --kernel-us 200 --seconds 600 --device 0 & {0} --kernel-us 200 --seconds 600 --device 1 & wait",
        spin.display()
    );
    let start = |name: &str| {
        let mut command = sandbox.job(&["--name", name, "--share", "0.5"], "sh");
        Running::start(command.args(["-c", &script]))
    };
    let both = [start("a"), start("b")];
    wait_until("both have used both devices", || {
        ["a", "b"]
            .iter()
            .all(|name| {
                let devices = job(&sandbox, name).devices;
                devices.len() == 2 && devices.iter().all(|d| d.device_time_ns > 100_000_000)
            })
            .then_some(())
    });
    wait_until("both are taken for gangs", || {
        (job(&sandbox, "a").gang && job(&sandbox, "b").gang).then_some(())
    });
    goes_on(&sandbox, "a");
    goes_on(&sandbox, "b");
    Outcome::of(&mut sandbox.sublet(["set", "a", "--gang=false"])).succeeded();
    assert!(!job(&sandbox, "a").gang);
    goes_on(&sandbox, "a");
    goes_on(&sandbox, "b");
    drop(both);
}
