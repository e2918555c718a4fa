-- Checks jobs that ask for a part of a GPU, and holds those that `sublet cluster slurm` places.
-- Lies beside slurm.conf, with JobSubmitPlugins=lua. Lines to adapt come first.

-- GPU memory that one shard stands for, in bytes: as `shard=` in plugstack.conf.
local SHARD = 1024 * 1024 * 1024
-- Memory of the largest GPU of the cluster, in shards; 0: not checked.
local LARGEST = 0
-- Hold jobs of one GPU, so that `sublet cluster slurm` chooses node and GPU. Nodes then have to name
-- the types of their GPUs (Gres=gpu:g0:1,gpu:g1:1). Jobs that name nodes, features or a reservation,
-- and arrays, are left to Slurm.
local HOLD = false

local UNITS = { K = 1024, M = 1024 ^ 2, G = 1024 ^ 3, T = 1024 ^ 4 }

-- Bytes of "8G", "512M", "1.5GiB"; nil where it is no size.
local function bytes(text)
   local number, unit = string.match(text, "^([%d.]+)%s*([KMGTkmgt])i?[Bb]?$")
   number = tonumber(number)
   if number == nil then
      return nil
   end
   return number * UNITS[string.upper(unit)]
end

-- Shards that the job asks for on its node, and their type; nil: none.
local function shards_of(gres)
   for one in string.gmatch(gres or "", "[^,]+") do
      local typed, kind, count = string.match(one, "shard[:/]([%a_][^:]*):(%d+)$"), nil, nil
      if typed then
         kind, count = string.match(one, "shard[:/]([%a_][^:]*):(%d+)$")
      else
         count = string.match(one, "shard[:/=](%d+)$") or (string.match(one, "shard$") and 1)
      end
      if count then
         return tonumber(count), kind
      end
   end
   return nil
end

-- Our options by name, as the submitting program sends them to the prolog's environment.
local function options_of(job)
   local found = {}
   for _, line in pairs(job.spank_job_env or {}) do
      local name, value = string.match(line, "^_SLURM_SPANK_OPTION_sublet_gpu_(%w+)=?(.*)$")
      if name then
         found[name] = value
      end
   end
   return found
end

local function refuse(text)
   slurm.log_user("sublet: %s", text)
   return slurm.ERROR
end

-- Whether something is asked for by the job, socket or task, where only that by the node is ours.
local function asks_elsewhere(job)
   for _, text in ipairs({ job.tres_per_job or "", job.tres_per_socket or "", job.tres_per_task or "" }) do
      if string.find(text, "gpu", 1, true) or string.find(text, "shard", 1, true) then
         return true
      end
   end
   return false
end

local function set(text)
   return text ~= nil and text ~= ""
end

-- Whether the job asks for more than one node; how many it gets in the end is seen on the node.
local function over_nodes(job)
   return job.min_nodes ~= nil and job.min_nodes < 4294967294 and job.min_nodes > 1
end

-- Whether Slurm has to choose the node: the packer would overwrite what the job says of nodes, lose
-- what else it asks for there, put all tasks of an array onto one GPU, or release what its user
-- holds.
local function is_slurms(job)
   local none = 4294967294
   return job.priority == 0 or string.find(job.tres_per_node or "", ",", 1, true) ~= nil
      or set(job.features) or set(job.req_nodes) or set(job.reservation) or set(job.array_inx)
      or job.shared == 0
      or (job.het_job_offset ~= nil and job.het_job_offset < none)
      or over_nodes(job)
end

function slurm_job_submit(job, partitions, uid)
   -- The packer's own, by which it knows held jobs.
   if uid ~= 0 and string.find(job.admin_comment or "", "^sublet:") then
      return refuse("AdminComment begins with `sublet:`, which only the packer may write")
   end
   local asked = options_of(job)
   local unaligned = asked.unaligned ~= nil
   asked.unaligned = nil
   local evictable = asked.evictable ~= nil
   local shards, kind = shards_of(job.tres_per_node or job.gres)
   if next(asked) == nil and shards == nil then
      return slurm.SUCCESS
   end
   -- They go into AdminComment, where a comma would begin another word.
   if asked.share and not string.find(asked.share, "^ *[%d.]+ *%%? *$") then
      return refuse("--gpu-share: `" .. asked.share .. "` is no share: write a number above 0 and at most 1, or a percentage")
   end
   if asked.class and not string.find(asked.class, "^%a+$") then
      return refuse("--gpu-class: `" .. asked.class .. "` is no class: write guaranteed or opportunistic")
   end
   local needed = nil
   if asked.mem then
      local size = bytes(asked.mem)
      if size == nil then
         return refuse("--gpu-mem is `" .. asked.mem .. "`: write a size such as 8G")
      end
      needed = math.ceil(size / SHARD)
      if LARGEST > 0 and needed > LARGEST then
         return refuse(string.format("--gpu-mem %s takes %d shards, and no GPU has more than %d", asked.mem, needed, LARGEST))
      end
      if shards and needed > shards then
         return refuse(string.format("--gpu-mem %s takes %d shards, and the job asks for %d: write --gres=shard:%d", asked.mem, needed, shards, needed))
      end
   end
   local elsewhere = asks_elsewhere(job)
   local whole = string.find(job.tres_per_node or "", "gpu", 1, true)
   if shards == nil and not whole and not elsewhere then
      if needed == nil then
         return refuse("a share of a GPU takes a part of its memory: add --gpu-mem=8G, or --gres=shard:N")
      end
      shards = needed
      -- As `gres`: what `tres_per_node` begins with is another word from 23.11 on.
      job.gres = "shard:" .. shards
   end
   if shards and shards > 0 and not unaligned and over_nodes(job) then
      return refuse("a job over several nodes shares GPUs, and its turns on them are not at the same time: ask for whole GPUs (--gres=gpu:1), or add --gpu-unaligned where its tasks do not wait for each other")
   end
   if HOLD and shards and shards > 0 and kind == nil and not whole and not elsewhere and not is_slurms(job) then
      -- Without shards until the packer names some of a GPU: 22.05 would add those to what is there.
      job.tres_per_node = ""
      job.priority = 0
      job.admin_comment = string.format("sublet:hold,mem=%s,share=%s,class=%s%s,shards=%d",
         asked.mem or "", (string.gsub(asked.share or "", " ", "")), asked.class or "", evictable and ",evictable=1" or "", shards)
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
